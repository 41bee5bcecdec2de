"""Keeps the stand-ins out of pytest's own process, where other libraries would find them."""

collect_ignore = ["stand_ins"]
