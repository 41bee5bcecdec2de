"""Training steps: how and when they change the weights."""
