"""Read the initial weights of a model from a directory of safetensors files."""
