"""The planner of SPP (INFOCOM 2022)."""
