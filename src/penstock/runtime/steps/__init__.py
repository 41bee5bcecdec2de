"""What a training step does to the weights, and when."""
