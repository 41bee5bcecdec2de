"""Measure or estimate what layers cost on a device, and measure the links between processes."""
