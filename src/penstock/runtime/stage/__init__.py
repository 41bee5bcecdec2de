"""A stage on this rank: how it is built, called, and run forwards and backwards."""
