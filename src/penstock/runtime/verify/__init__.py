"""Whether a pipeline computes what the model left whole computes."""
