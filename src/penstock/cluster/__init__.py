"""Devices, hosts and links: what a plan runs on."""
