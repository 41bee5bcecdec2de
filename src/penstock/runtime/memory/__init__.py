"""Memory: what a process may take, and what it took."""
