"""Conditions on the number of samples that tracing could not prove, and that hold all the same.

The code of a model that reshapes may ask whether ``16 * rows * min(64, 1024 * rows)`` is
``1024 * rows``. It is, for any number of rows; torch cannot simplify it, and gives up.
"""

import re
from itertools import product

__all__ = ["guards_in", "hold_for_all_rows"]

MOST_ROWS = 256
"""Numbers of samples for which a condition is tried."""

_SAMPLES = re.compile(r"L\['leaves'\]\[\d+\]\.size\(\)\[0\]")
_GUARD = re.compile(r"satisfy the generated guard (.*[^.\s])")


def guards_in(error: BaseException) -> list[str]:
    """The conditions that ``error`` complains of, with ``rows`` for the samples of any tensor."""
    return [_SAMPLES.sub("rows", guard) for guard in _GUARD.findall(str(error))]


def hold_for_all_rows(error: BaseException) -> bool:
    """Whether ``error`` complains of nothing but conditions that hold for any number of samples.

    They are tried, not proven: formulas of sizes that hold for all numbers up to `MOST_ROWS` hold.
    """
    guards = guards_in(error)
    complaints = re.findall(r"^\s+- ", str(error), re.MULTILINE)
    if not guards or len(complaints) != len(guards):
        return False
    names = {"__builtins__": {}, "min": min, "max": max}
    try:
        return all(
            eval(guard, names, {"rows": rows})
            for guard, rows in product(guards, range(1, MOST_ROWS + 1))
        )
    except (NameError, SyntaxError, TypeError, ZeroDivisionError):
        return False
