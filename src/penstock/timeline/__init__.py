"""Timelines: what each device does when, predicted or measured."""
