"""The cluster that a plan runs on: devices, hosts and links."""
