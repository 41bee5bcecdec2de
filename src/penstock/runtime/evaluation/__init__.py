"""Forwards only: evaluation, prediction and metrics."""
