"""Verification that a pipeline computes the same as the whole model."""
