"""Memory: how much a process may use, and how much it used."""
