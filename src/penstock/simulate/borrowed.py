"""Arrays as bare addresses, for compiled code."""

# numba has no types: what it makes is unknown to a strict checker.
# pyright: basic

from typing import Any

from numba.core.types import CPointer
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

__all__ = ["borrowed"]


def address(typing_context, array):
    """The type and the code of `borrowed`."""

    def code(context, builder, signature, arguments):
        return make_array(array)(context, builder, arguments[0]).data

    return CPointer(array.dtype)(array), code


borrowed: Any = intrinsic(address)
"""The address of a flat array that the caller keeps alive: places in it are read and written, no
more, and none counts from the end.

An array is ten numbers, whose owner counts references at every call that is not inlined: with
addresses the simulator's engine is faster, and compiled in half the time.
"""
