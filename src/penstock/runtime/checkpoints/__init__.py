"""Files that a pipeline writes: checkpoints, weights, adapters."""
