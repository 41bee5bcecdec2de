"""Conditions on the number of samples that tracing could not prove but that always hold.

The code of a model that reshapes may ask whether ``16 * rows * min(64, 1024 * rows)`` equals
``1024 * rows``. It does for any number of rows, but PyTorch cannot simplify it and gives up.
"""

import re
from itertools import product

__all__ = ["guards_in", "hold_for_all_rows"]

MOST_ROWS = 256
"""Conditions are tried for numbers of samples up to this one."""

_SAMPLES = re.compile(r"L\['leaves'\]\[\d+\]\.size\(\)\[0\]")
_GUARD = re.compile(r"satisfy the generated guard (.*[^.\s])")


def guards_in(error: BaseException) -> list[str]:
    """The conditions that ``error`` reports, with ``rows`` for the samples of any tensor."""
    return [_SAMPLES.sub("rows", guard) for guard in _GUARD.findall(str(error))]


def hold_for_all_rows(error: BaseException) -> bool:
    """Whether all conditions that ``error`` reports hold for any number of samples.

    They are tried, not proven: size formulas that hold for all numbers up to `MOST_ROWS` are taken
    as true.
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
