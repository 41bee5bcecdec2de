"""Plans to and from the layouts of other frameworks; no torch."""
