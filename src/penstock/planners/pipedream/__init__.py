"""The planner of PipeDream (SOSP 2019)."""
