"""Comparisons of plans, the reasons for a plan, and planning as one call."""
