"""Gradients: buckets, sums over ranks, loss scaling, noise scale, and sharded optimizer state."""
