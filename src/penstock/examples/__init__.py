"""The built-in jobs."""
