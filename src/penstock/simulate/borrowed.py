"""Arrays without an owner, for compiled code."""

# numba has no types: what it makes is unknown to a strict checker.
# pyright: basic

from typing import Any

from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

__all__ = ["borrowed"]


def without_owner(typing_context, array):
    """The type and the code of `borrowed`."""

    def code(context, builder, signature, arguments):
        view = make_array(array)(context, builder, arguments[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    return array(array), code


borrowed: Any = intrinsic(without_owner)
"""A view of an array that the caller keeps alive; passing it on counts no references.

Counting is atomic and happens at every call that is not inlined: it took a tenth of the time of
the simulator's engine.
"""
