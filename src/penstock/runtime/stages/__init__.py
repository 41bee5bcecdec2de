"""A stage on this rank: built, called, run forwards and backwards."""
