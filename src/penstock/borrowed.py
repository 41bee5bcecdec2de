"""Arrays and named tuples by their addresses, for compiled code."""

# numba has no types: what it makes is unknown to a strict checker.
# pyright: basic

from typing import Any

from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default
from numba.core.imputils import impl_ret_borrowed
from numba.core.types import BaseNamedTuple, CPointer, Type
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic
from numba.np.arrayobj import make_array

__all__ = ["borrowed"]


class Borrowed(Type):
    """The address of a named tuple."""

    def __init__(self, record):
        self.record = record
        super().__init__(f"Borrowed({record}, {record.fields})")


@register_default(Borrowed)
class BorrowedModel(PrimitiveModel):
    """How the address is handed on."""

    def __init__(self, models, kind):
        place = models.lookup(kind.record).get_value_type().as_pointer()
        super().__init__(models, kind, place)


@infer_getattr
class FieldTypes(AttributeTemplate):
    """The types of a named tuple's fields."""

    key = Borrowed

    def generic_resolve(self, typ, attr):
        """That of the field named ``attr``."""
        if attr in typ.record.fields:
            return typ.record.types[typ.record.fields.index(attr)]
        return None


@lower_getattr_generic(Borrowed)
def field(context, builder, kind, address, name):
    """A field, read where it stands."""
    place = kind.record.fields.index(name)
    value = builder.load(cgutils.gep_inbounds(builder, address, 0, place))
    return impl_ret_borrowed(context, builder, kind.record.types[place], value)


def address(typing_context, lent):
    """The type and the code of `borrowed`."""

    def of_record(context, builder, signature, arguments):
        place = cgutils.alloca_once(builder, arguments[0].type)
        builder.store(arguments[0], place)
        return place

    def of_array(context, builder, signature, arguments):
        return make_array(lent)(context, builder, arguments[0]).data

    if isinstance(lent, BaseNamedTuple):
        return Borrowed(lent)(lent), of_record
    return CPointer(lent.dtype)(lent), of_array


borrowed: Any = intrinsic(address)
"""The address of a flat array, or of a named tuple, that the caller keeps alive.

Of an array places are read and written, no more, and none counts from the end. An array is ten
numbers, whose owner counts references at every call that is not inlined, and a named tuple is all
its arrays: with addresses the simulator's engine is faster, and compiled in half the time.
"""
