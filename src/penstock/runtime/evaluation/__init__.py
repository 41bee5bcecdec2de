"""Passes with forwards only: evaluation, prediction and metrics."""
