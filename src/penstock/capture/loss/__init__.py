"""How the parts of a loss count over micro-batches."""
