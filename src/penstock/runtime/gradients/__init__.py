"""Gradients: buckets, sums over ranks, loss scaling, and sharded optimizer state."""
