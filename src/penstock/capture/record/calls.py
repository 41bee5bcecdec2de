"""The record of one run of the user's program: each call with what it read, made and wrote.

Units are modules whose calls other stages leave out as a whole. Everything outside of units runs
on every stage. The record has one event for each call of a unit, and for each call of a torch
function between units:

    address of a unit call      (path, n)                    the n-th call of this module
    address of a torch call     (anchor, function, line, n)  the n-th call there since the unit call
                                                             ``anchor``
    value                       a number; its address is that of its maker, and the slot in there
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.user_lines import Line
from penstock.torch_internals import checkpoint_here

Address: TypeAlias = tuple[Any, ...]

MASK = "mask or repeats"
"""Name of a call that requests values which decide about a size."""


@dataclass(slots=True)
class Value:
    """A tensor between calls: event ``maker`` made it as its result number ``slot``.

    ``slot`` is ``("w", j)`` for the j-th tensor that was written to. A value that is not
    ``crossable`` cannot be sent from one stage to another. One that is not ``of_batch`` is computed
    from parameters and sizes alone.
    """

    maker: int
    slot: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    crossable: bool = True
    of_batch: bool = True


@dataclass(frozen=True, slots=True)
class TensorReference:
    """Placeholder for a tensor in recorded arguments: a value, a parameter's name, or None."""

    value: int | str | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Made:
    """A leaf of the result of a unit or a block.

    Its ``kind`` is "made", a tensor that it made, by its value; "given", a tensor of its arguments,
    by path; "handed on", an object of these that torch's trees do not open, by path; or "constant".
    """

    kind: str
    what: Any
    dtype: torch.dtype | None = None
    grad: bool = False


@dataclass(slots=True)
class RecordedCall:
    """A call. ``reads`` and ``makes`` are values, ``leaves`` the batch's leaves that it read.

    ``params`` and ``buffers`` are names of what a call between units read. ``reads_values``: its
    result is no tensor but depends on values; ``answer`` is that result. ``depends``: on
    parameters, and so on stages; what does not is found from the batch alone, by every stage.
    ``random``: it draws. ``result`` are the leaves of a unit's result, and the structure of it.
    ``stranger`` says which tensor it read that is trained, but none of the program's.
    """

    address: Address
    func: Any = None
    line: Line | None = None
    reads: list[int] = field(default_factory=list[int])
    leaves: set[int] = field(default_factory=set[int])
    params: list[str] = field(default_factory=list[str])
    buffers: list[str] = field(default_factory=list[str])
    makes: list[int] = field(default_factory=list[int])
    args: Any = None
    reads_values: bool = False
    answer: Any = None
    random: bool = False
    depends: bool = False
    is_unit: bool = False
    result: tuple[list[Made], Any] | None = None
    stranger: str = ""


@dataclass(slots=True)
class BlockCall:
    """The call of a module that holds several units: events ``first`` to ``last``.

    A stage that none of it belongs to leaves it out as a whole, if it is ``closed``: what others
    use of it is what it returned.
    """

    path: str
    first: int
    last: int
    result: tuple[list[Made], Any]
    anchor: Address | None
    closed: bool


@dataclass(slots=True)
class Hooks:
    """Hooks on gradients, registered by code between units or on modules there.

    ``on_modules``: by path, the events of each call of a module with hooks on its backward, first
    and last. ``on_tensors``: the values, by the address of the call that registers a hook.
    ``events`` are those of torch's own functions around modules, which other stages mute.
    ``any_on_tensors``: also within units.
    """

    on_modules: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict[str, list[tuple[int, int]]]
    )
    on_tensors: dict[Address, int] = field(default_factory=dict[Address, int])
    events: set[int] = field(default_factory=set[int])
    any_on_tensors: bool = False


@dataclass(eq=False)
class ProgramRecord:
    """A run of ``program`` with these ``units``, which are paths of modules.

    Units in ``varying`` have more calls in other batches, so what follows one of their calls is
    found by the unit. ``counts`` are the calls of each unit. Nothing can be cut within ``regions``,
    ranges of events: checkpoints, own functions. Units in ``opened`` must be opened, with the
    reason.

    The writes to buffers and parameters are events; ``overwritten`` are values, with the event that
    wrote over them. ``dependent`` values depend on parameters. Activations decide about the sizes
    of values in ``decided``, and of what is made of these.
    """

    program: UserProgram
    units: Sequence[str]
    varying: frozenset[str] = frozenset()
    between: tuple[str, ...] = ()
    """The paths of the modules that are no unit nor in one."""
    events: list[RecordedCall] = field(default_factory=list[RecordedCall])
    values: list[Value] = field(default_factory=list[Value])
    blocks: list[BlockCall] = field(default_factory=list[BlockCall])
    model_end: int = 0
    """The events before this one are the model's; the others are those of the loss."""
    counts: Counter[str] = field(default_factory=Counter[str])
    regions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    opened: dict[str, str] = field(default_factory=dict[str, str])
    buffer_writes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    parameter_writes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    overwritten: dict[int, int] = field(default_factory=dict[int, int])
    dependent: set[int] = field(default_factory=set[int])
    decided: set[int] = field(default_factory=set[int])
    hooks: Hooks = field(default_factory=Hooks)
    checkpoints: dict[int, tuple[Any, int, int]] = field(
        default_factory=dict[int, tuple[Any, int, int]]
    )
    """The user's checkpoints, by identity, each with its first event and the one after."""
    reentrant: set[int] = field(default_factory=set[int])
    """The first events of the user's reentrant checkpoints."""
    norms: list[str] = field(default_factory=list[str])
    """Places at which samples are normalised over the batch."""
    frequencies: list[str] = field(default_factory=list[str])
    """Places at which gradients of a table are divided by how often the batch has an index."""
    has_gradients: bool = False
    """True if torch.autograd.grad is called, in units or between them."""
    has_scripts: bool = False
    """True if functions of torch.jit.script are called."""
    has_nested: bool = False
    """True if units call modules of other units."""
    is_temporary: bool = False
    """True if the program changes its own state between units, and may take that back later."""

    def note_checkpoint(self) -> None:
        """Note that the next event is in the user's checkpoint that runs, if one does."""
        found, number = checkpoint_here(), len(self.events)
        if found is not None:
            _, first, _ = self.checkpoints.get(id(found), (found, number, number))
            self.checkpoints[id(found)] = (found, first, number + 1)

    @property
    def by_address(self) -> dict[Address, RecordedCall]:
        """The calls by their addresses."""
        return {event.address: event for event in self.events}

    def anchor_of(self, address: Address) -> Address:
        """The first part of the addresses of calls that follow this call of a unit."""
        return (address[0], -1) if address[0] in self.varying else address

    def behind(
        self, events: Iterable[int], through: Callable[[Value], bool] = lambda value: True
    ) -> frozenset[int]:
        """These events, and those that make what they read, as far as ``through`` is true of it."""
        todo, found = list(events), set[int]()
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                read = (self.values[value] for value in self.events[number].reads)
                todo += [value.maker for value in read if through(value)]
        return frozenset(found)

    def is_local(self, writes: Sequence[int]) -> bool:
        """Return whether events write something of the batch, of activations, or in the loss."""
        behind = (self.events[number] for number in self.behind(writes))
        return max(writes) >= self.model_end or any(e.depends or e.leaves for e in behind)

    @cached_property
    def local_buffers(self) -> dict[str, list[int]]:
        """The buffers that belong to one stage, with the calls of that stage which write them.

        They are written from the batch or activations, or by a loss function, which only the last
        stages run. What the model writes of neither, all stages write.
        """
        return {name: own for name, own in self.buffer_writes.items() if self.is_local(own)}
