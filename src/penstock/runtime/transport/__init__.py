"""What travels between ranks, and how."""
