"""Other frameworks' layouts and training loops."""
