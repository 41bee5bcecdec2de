"""The loops of `zero_bubble_loop` on arrays, to be compiled."""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from collections.abc import Callable
from typing import Any

from penstock.borrowed import borrowed
from penstock.schedule.families.zero_bubble_loop import filled, rearranged

__all__ = ["LOOPS_ON_ARRAYS"]


def filled_in_arrays(costs, first, actions, home, out):
    """`filled`, to be compiled."""
    return filled(borrowed(costs), borrowed(first), borrowed(actions), borrowed(home), out)


def rearranged_in_arrays(costs, rank, deepest, patient, out):
    """`rearranged`, to be compiled."""
    rearranged(borrowed(costs), borrowed(rank), borrowed(deepest), patient, out)


LOOPS_ON_ARRAYS: dict[str, Callable[..., Any]] = {
    "filled": filled_in_arrays,
    "rearranged": rearranged_in_arrays,
}
