"""From a model and one batch to layers, and from layers to stage modules."""
