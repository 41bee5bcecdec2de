"""What happened when, predicted or measured."""
