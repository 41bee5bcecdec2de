"""Captures a model with one batch as layers, and builds stage modules from layers."""
