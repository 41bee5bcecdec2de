"""First weights of a model, read from a directory of safetensors."""
