"""Host memory that one micro-batch frees is kept for the next.

The C library gives freed memory back to the system, which hands out zeroed pages when it is asked
again: thousands of page faults for each micro-batch of a model of some size. An iteration asks for
the same sizes again and again, so its memory is worth keeping.
"""

import ctypes
import os

__all__ = ["keep_freed_memory"]

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Settings of ``mallopt`` in glibc's malloc.h."""

KEPT_BYTES = 256 << 20
"""What may lie free at the end of the heap before some of it is given back."""

MAPPED_BYTES = 32 << 20
"""Larger pieces are mapped one by one and given back at once (the most that glibc allows)."""


def keep_freed_memory() -> None:
    """Make the C library keep what is freed; whoever set it by an environment variable decides.

    Does nothing where the library is another than glibc.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in chosen):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
