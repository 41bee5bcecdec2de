"""The planner of DAPPLE (PPoPP 2021)."""
