"""A run for people: one page, a trace, tables."""
