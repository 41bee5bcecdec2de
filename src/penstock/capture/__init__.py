"""Capture a model with one batch as layers, and build stage modules from layers."""
