"""Weights & Biases and MLflow: values of each step, sent by a process beside rank 0."""
