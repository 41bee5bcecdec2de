"""The processes of a run: their ranks, their start, and values exchanged between them."""
