"""A quicker start of planning and compiled code, for processes that are ours alone."""

import atexit
import gc
import sys
from importlib import import_module

__all__ = ["collect_garbage_rarely", "start_numba_without_scipy"]

NEW_OBJECTS = 400_000
"""So many more objects are made than freed before Python looks for cycles among them."""


def collect_garbage_rarely() -> None:
    """Let Python look for unreachable cycles less often, and not at the end: saves about 0.3 s.

    Loading libraries makes a few hundred thousand objects that all stay; to search them again and
    again finds nothing.
    """
    gc.set_threshold(NEW_OBJECTS, 50, 100)
    atexit.register(gc.freeze)


def start_numba_without_scipy() -> None:
    """Load numba's arrays without ``scipy.linalg``, which saves about 0.15 s.

    Numba imports it before any compiled code runs, only to find out whether there is a BLAS for
    matrix products; nothing here multiplies matrices. Afterwards ``scipy.linalg`` can be imported
    as ever, but compiled code of this process has no ``np.dot``: hence not for a library.
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
