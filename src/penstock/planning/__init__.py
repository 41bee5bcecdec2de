"""Planner and simulator together: from a profile and a cluster to a plan and its promises."""
