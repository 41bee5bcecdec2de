"""Orders of work that are searched for."""
