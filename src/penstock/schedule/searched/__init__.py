"""Schedules found by search."""
