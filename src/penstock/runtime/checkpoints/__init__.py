"""What a pipeline writes to disk: its state, its weights, its adapters."""
