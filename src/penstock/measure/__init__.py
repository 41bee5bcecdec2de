"""What layers cost on this device, and what messages cost between these processes."""
