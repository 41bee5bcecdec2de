"""The processes of a run: who they are, how they are started, what they tell one another."""
