"""Arrays handed on in compiled code as nothing but their addresses."""

# numba has no types: what it makes is unknown to a strict checker.
# pyright: basic

from typing import Any

from numba.core.errors import TypingError
from numba.core.types import Array, BaseTuple, CPointer
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

__all__ = ["borrowed"]


def refuse_gaps(kind: Any) -> None:
    """Raise a typing error of numba unless an array of this type is contiguous."""
    if kind.layout != "C":
        raise TypingError(f"only an array without gaps can be borrowed, not {kind}")


def address_of(kind: Any, context: Any, builder: Any, array: Any) -> Any:
    """The code of the address of an array."""
    return make_array(kind)(context, builder, array).data


def address(typing_context, lent: Any):
    """The type and the code of `borrowed`; numba shows what is raised as a typing error."""

    def of_array(context, builder, signature, arguments):
        return address_of(lent, context, builder, arguments[0])

    def of_record(context, builder, signature, arguments):
        values = [builder.extract_value(arguments[0], place) for place in range(len(kinds))]
        for place, kind in enumerate(lent.types):
            if isinstance(kind, Array):
                values[place] = address_of(kind, context, builder, values[place])
        return context.make_tuple(builder, signature.return_type, values)

    for kind in [lent] if isinstance(lent, Array) else lent.types:
        if isinstance(kind, Array):
            refuse_gaps(kind)
    if isinstance(lent, Array):
        return CPointer(lent.dtype)(lent), of_array
    fields: Any = lent.types
    kinds = [CPointer(kind.dtype) if isinstance(kind, Array) else kind for kind in fields]
    record: Any = BaseTuple.from_types(kinds, lent.instance_class)
    return record(lent), of_record


borrowed: Any = intrinsic(address)
"""The address of a contiguous array, or a named tuple with the addresses of its arrays.

Compiled code can read and write elements by index from the start, and nothing else. The caller must
keep the array alive. An array that a kernel made itself is freed after its last use by name.

Numba passes an array as ten numbers, and counts references at every call that is not inlined. With
addresses, the planners' loops run several times faster and compile in half the time.
"""
