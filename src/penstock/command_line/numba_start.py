"""A faster start of planning and compiled code, for processes that run only Penstock."""

import atexit
import gc
import sys
from importlib import import_module

__all__ = ["collect_garbage_rarely", "start_numba_without_scipy"]

NEW_OBJECTS = 400_000
"""Garbage collection starts when this many more objects have been created than freed."""


def collect_garbage_rarely() -> None:
    """Run Python's garbage collector less often, and not at exit; saves about 0.3 s.

    Loading libraries creates a few hundred thousand objects that all stay, so collections find
    nothing.
    """
    gc.set_threshold(NEW_OBJECTS, 50, 100)
    atexit.register(gc.freeze)


def start_numba_without_scipy() -> None:
    """Load numba's arrays without ``scipy.linalg``, which saves about 0.15 s.

    Numba imports it before any compiled code runs, only to find a BLAS for matrix products, and
    nothing here multiplies matrices. ``scipy.linalg`` can still be imported afterwards, but
    compiled code of this process has no ``np.dot``. So a library must not call this.
    """
    if "scipy.linalg" in sys.modules or "numba.np.arraymath" in sys.modules:
        return
    import_module("numba")  # asks scipy for its version

    absent: dict[str, None] = {"scipy.linalg": None}
    sys.modules.update(absent)  # type: ignore[arg-type]  # the documented way to block an import
    try:
        import_module("numba.np.arraymath")
    finally:
        del sys.modules["scipy.linalg"]
