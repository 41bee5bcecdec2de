"""Measures or estimates what layers cost on a device, and measures the links between processes."""
