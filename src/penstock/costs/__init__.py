"""Costs of plans: seconds and bytes of stages, what fits, and bounds of any order."""
