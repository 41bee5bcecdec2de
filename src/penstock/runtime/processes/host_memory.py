"""Keeps the host memory that one micro-batch frees for the next.

The C library returns freed memory to the system, which hands out zeroed pages at the next request.
That costs thousands of page faults for each micro-batch of a model of moderate size. An iteration
requests the same sizes repeatedly, so keeping its memory pays.
"""

import ctypes
import os

__all__ = ["keep_freed_memory"]

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` in glibc's malloc.h."""

KEPT_BYTES = 256 << 20
"""Free memory at the end of the heap that is kept."""

MAPPED_BYTES = 32 << 20
"""Larger blocks are mapped one by one and returned when freed (the largest value of glibc)."""


def keep_freed_memory() -> None:
    """Make the C library keep freed memory, unless the user has set it by environment variables.

    Does nothing with other libraries than glibc.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in chosen):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
