"""Costs of each layer of a model, and the file formats for them."""
