"""The simulator: predicts time, memory and timeline of a plan."""
