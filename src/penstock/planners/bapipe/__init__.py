"""The planner of BaPipe (2020)."""
