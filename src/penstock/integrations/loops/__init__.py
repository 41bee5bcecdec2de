"""Other libraries' training loops, in which a pipeline takes the steps."""
