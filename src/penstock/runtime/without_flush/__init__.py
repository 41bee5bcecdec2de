"""Training whose pipeline never runs empty: batch follows batch."""
