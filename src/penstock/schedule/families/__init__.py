"""Schedules from the literature, one file each."""
