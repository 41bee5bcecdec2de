"""Run the user's own forward on one stage: calls of other stages are left out."""
