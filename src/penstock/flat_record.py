"""Many lists in one array, read by name in compiled code that is handed nothing but an address.

A kernel whose helpers share some sixty lists cannot hand each of them on: every call would copy
sixty addresses. Here all lists lie in one int64 array, whose first places say where each starts:

    in_state = reader("state", (("now_s", 0, False, False), ("busy", 1, True, True)))

    def kernel(array):
        state = in_state(array)
        state.now_s += 1.0
        state.busy[3] = 1

Real numbers take the same eight bytes as whole ones. As with `borrowed`, places are not
checked, and the caller keeps the array alive.
"""

# numba has no types: what it makes is unknown to a strict checker.
# pyright: basic

from typing import Any, TypeAlias

from llvmlite import ir
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default
from numba.core.errors import TypingError
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.types import Array, BaseTuple, CPointer, Type, float64, int64
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

__all__ = ["Part", "borrowed", "reader"]

Part: TypeAlias = tuple[str, int, bool, bool]
"""A name, a place in the array, whether it holds whole numbers, and whether it is a list, whose
start then stands at that place."""


def reader(name: str, parts: tuple[Part, ...]) -> Any:
    """What makes of an int64 array the record that lies in it; for compiled code only.

    ``parts`` is a tuple, which the fingerprint of a kernel takes in as it is.
    """

    def read(typing_context, array: Any):
        def code(context, builder, signature, arguments):
            return address_of(array, context, builder, arguments[0])

        refuse_gaps(array)
        return RecordType(name, parts)(array), code

    return intrinsic(read)


class RecordType(Type):
    """The type of a record: an address, and what is where."""

    def __init__(self, name: str, parts: tuple[Part, ...]) -> None:
        super().__init__(name)
        self.parts = parts
        self.kinds: dict[str, Any] = {}
        self.places: dict[str, int] = {}
        for part, place, whole, is_list in parts:
            number = int64 if whole else float64
            self.kinds[part] = CPointer(number) if is_list else number
            self.places[part] = place

    @property
    def key(self) -> Any:
        """What tells one type from another."""
        return self.name, self.parts


@register_default(RecordType)
class RecordModel(PrimitiveModel):
    """How a record is handed on: as an address."""

    def __init__(self, manager: Any, kind: RecordType) -> None:
        super().__init__(manager, kind, ir.IntType(64).as_pointer())


@infer_getattr
class RecordNames(AttributeTemplate):
    """What the name of a part stands for."""

    key = RecordType

    def generic_resolve(self, record: RecordType, name: str) -> Any:
        """Its type, or None."""
        return record.kinds.get(name)


def place_of(builder: Any, address: Any, place: int) -> Any:
    """The address of one place."""
    return builder.gep(address, [ir.Constant(ir.IntType(64), place)])


@lower_getattr_generic(RecordType)
def read_part(context: Any, builder: Any, record: RecordType, address: Any, name: str) -> Any:
    """A number, or the address of a list's first value."""
    kind, here = record.kinds[name], place_of(builder, address, record.places[name])
    form = context.get_value_type(kind)
    if isinstance(kind, CPointer):
        return builder.bitcast(builder.gep(address, [builder.load(here)]), form)
    return builder.load(builder.bitcast(here, form.as_pointer()))


@lower_setattr_generic(RecordType)
def write_number(context: Any, builder: Any, signature: Any, arguments: Any, name: str) -> None:
    """Put a number in its place."""
    record, (address, value) = signature.args[0], arguments
    here = place_of(builder, address, record.places[name])
    builder.store(value, builder.bitcast(here, value.type.as_pointer()))


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
addresses, the simulator's engine and the planners' loops run several times faster and compile in
half the time.
"""
