"""Arrays, and named tuples of them, as bare addresses, for compiled code."""

# numba has no types: what it makes is unknown to a strict checker.
# pyright: basic

from typing import Any

from numba.core.types import Array, BaseTuple, CPointer
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

__all__ = ["borrowed"]


def address(typing_context, lent: Any):
    """The type and the code of `borrowed`."""

    def of_array(context, builder, signature, arguments):
        return make_array(lent)(context, builder, arguments[0]).data

    def of_record(context, builder, signature, arguments):
        values = [builder.extract_value(arguments[0], place) for place in range(len(kinds))]
        for place, kind in enumerate(lent.types):
            if isinstance(kind, Array):
                values[place] = make_array(kind)(context, builder, values[place]).data
        return context.make_tuple(builder, signature.return_type, values)

    if isinstance(lent, Array):
        return CPointer(lent.dtype)(lent), of_array
    fields: Any = lent.types
    kinds = [CPointer(kind.dtype) if isinstance(kind, Array) else kind for kind in fields]
    record: Any = BaseTuple.from_types(kinds, lent.instance_class)
    return record(lent), of_record


borrowed: Any = intrinsic(address)
"""The address of an array without gaps, or a named tuple with the addresses of its arrays.

Places in it are read and written, no more, counted from its beginning. The caller keeps the array
alive: a kernel borrows what it was given, and what it made itself is gone after its last mention.
An array is ten numbers, whose owner counts references at every call that is not inlined; with
addresses the simulator's engine and the planners' loops are several times faster, and compiled in
half the time.
"""
