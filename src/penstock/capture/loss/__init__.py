"""Weighting of the parts of a loss over micro-batches."""
