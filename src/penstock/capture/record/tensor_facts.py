"""Facts about the tensors of a running program: which value each is, its memory, its origin."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.capture.record.absent import (
    SHAPE_ONLY,
    Absent,
    memory_of,
    version_of,
    writes_first,
)
from penstock.capture.record.calls import (
    Address,
    ProgramRecord,
    RecordedCall,
    TensorReference,
    Value,
)
from penstock.capture.record.model_and_loss import LOSS, UserProgram
from penstock.capture.record.model_state import StatePlace, place_of_state, value_at
from penstock.capture.record.user_lines import Line, line_in_words, line_of_user, line_with_source
from penstock.torch_internals import own_parameters, pytree, tensors_in


class SharedMemory:
    """Tensors by the memory that they share, and the version of each memory."""

    def __init__(self) -> None:
        self._tensors: dict[int, WeakTensorKeyDictionary] = {}
        self._versions: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> int | None:
        """Note a tensor; return its memory's key (None: it has none, under vmap)."""
        key = memory_of(tensor)
        if key is None:
            return None
        known = self._tensors.setdefault(key, WeakTensorKeyDictionary())
        if not known:
            self._versions[key] = version_of(tensor)
        known[tensor] = True
        return key

    def note_moved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that a write has given other memory: that of an absent one."""
        key = self.note(tensor)
        if key is not None:
            self._versions[key] = -1

    def take_write(self, tensor: torch.Tensor) -> int | None:
        """The key of the tensor's memory if it was written to since the last look."""
        key = memory_of(tensor)
        if key is None or self._versions.get(key) in (None, version_of(tensor)):
            return None
        self._versions[key] = version_of(tensor)
        return key

    def sharing(self, key: int) -> list[torch.Tensor]:
        """The living tensors with this memory."""
        return list(self._tensors.get(key, ()))


class TensorFacts:
    """Tensors by their number among the values of ``record``, and all else that is known of them.

    ``originals`` are the user's own parameters by name.
    """

    def __init__(self, record: ProgramRecord, originals: Mapping[str, torch.Tensor]) -> None:
        program = record.program
        self._record = record
        self.current, self.batch = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.memory = SharedMemory()
        self.hidden = WeakTensorKeyDictionary()
        """The units within which tensors were made that are not their results."""
        self.carried = WeakTensorKeyDictionary()
        """The places of what an earlier run has left in the model's state."""
        self.carried_reads: dict[StatePlace, dict[Address, Line]] = defaultdict(dict)
        """The calls that read something carried with their lines, by place."""
        self.apart = WeakTensorKeyDictionary()
        """True if a tensor is independent of the batch: made of parameters and sizes alone."""
        self.function_depth = 0
        """The user's autograd functions that run, one inside of another."""
        self.has_unknown = False
        """True if a call between units makes a tensor whose size is not known without values."""
        self.names: dict[int, str] = {}
        """The parameters' names."""
        for name, parameter in (*program.named_parameters(), *originals.items()):
            self.names.setdefault(id(parameter), name)
        self._buffers = dict(program.named_buffers())
        self._buffer_names = {id(buffer): name for name, buffer in self._buffers.items()}
        self._state = (
            ({memory_of(b): name for name, b in self._buffers.items()}, record.buffer_writes),
            (
                {memory_of(p): name for name, p in program.named_parameters()},
                record.parameter_writes,
            ),
        )
        self.owner: dict[str, str] = {}
        """The first unit that holds each parameter."""
        for path in record.units:
            for parameter in program.module(path).parameters():
                self.owner.setdefault(self.names[id(parameter)], path)

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a value or a parameter."""
        return tensor in self.current or id(tensor) in self.names

    def read(self, event: RecordedCall, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a call reads tensors."""
        program, opened = self._record.program, self._record.opened
        for tensor in tensors:
            value, leaf = self.current.get(tensor), self.batch.get(tensor)
            if leaf is not None:
                event.leaves.add(leaf)
            if value is not None:
                event.reads.append(value)
            name = self.names.get(id(tensor))
            if name is not None and not event.is_unit:
                event.params.append(name)
                owner = self.owner.get(name)
                if owner is not None and any(True for _ in program.module(owner).children()):
                    where = line_in_words(event.line)
                    opened.setdefault(owner, f"its parameters are read at {where}")
            if id(tensor) in self._buffer_names:
                event.buffers.append(self._buffer_names[id(tensor)])
            if value is None and name is None:
                unit = self.hidden.get(tensor)
                if unit is not None:
                    where = line_in_words(event.line)
                    opened[unit] = f"something other than its result is read at {where}"
                elif tensor.requires_grad and tensor.is_leaf:
                    event.stranger = f"{held_here(tensor)} at {line_with_source(event.line)}"
            self.note_carried(tensor, event.address)

    def note_carried(self, tensor: torch.Tensor, address: Address) -> None:
        """Note that a call reads a tensor, if an earlier run has left it."""
        place = self.carried.get(tensor)
        if place is not None and address not in self.carried_reads[place]:
            self.carried_reads[place][address] = line_of_user()

    def make(self, slot: Any, tensor: torch.Tensor, *, crossable: bool = True) -> None:
        """Let ``tensor`` be a value that the last event has made."""
        events, values, known = self._record.events, self._record.values, is_known(tensor)
        value = Value(len(events) - 1, slot, shape_of(tensor), tensor.dtype, tensor.requires_grad)
        value.of_batch = not self.apart.get(tensor)
        # Gradients pass an own function itself, not what it calls.
        value.crossable = crossable and known and not self.function_depth
        self.has_unknown = self.has_unknown or not known
        self.current[tensor] = len(values)
        events[-1].makes.append(len(values))
        values.append(value)
        self.memory.note(tensor)

    def note_writes(self, tensors: Sequence[torch.Tensor], made: set[int]) -> set[int]:
        """Make new values of all tensors to whose memory the last event wrote; return these."""
        event, number = self._record.events[-1], len(self._record.events) - 1
        done: set[int] = set()
        for tensor in tensors:
            key = self.memory.take_write(tensor)
            if key is None:
                continue
            done.add(key)
            for j, other in enumerate(self.memory.sharing(key)):
                name, before = self._buffer_names.get(id(other)), self.current.get(other)
                if name is not None and not event.is_unit:
                    self._record.buffer_writes.setdefault(name, []).append(number)
                if before is not None:
                    self._record.overwritten[before] = number
                if id(other) in made:
                    continue
                if before is not None:
                    event.reads.append(before)
                self.make(("w", j), other, crossable=False)
        return done

    def note_state_write(self, memory: int | None, written: Any) -> None:
        """Note that the last event wrote to a parameter or buffer, if one has this memory."""
        for names, writes in self._state:
            if memory in names:  # a write may make a tensor absent, in other memory
                own = names[memory_of(written)] = names[memory]
                writes.setdefault(own, []).append(len(self._record.events) - 1)

    def note_assigned(self) -> None:
        """A buffer for which forward has put another tensor is written by what made that."""
        record = self._record
        in_loss = LOSS in record.program.root_names
        for name, before in self._buffers.items():
            place, key = record.program.places(name)
            now = place.get(key)
            value = None if now is None or now is before else self.current.get(now)
            if value is not None:
                number = record.values[value].maker
                if in_loss and name.startswith(f"{LOSS}."):
                    number = max(number, record.model_end)
                record.buffer_writes.setdefault(name, []).append(number)

    def makers_at(self, place: StatePlace) -> list[int]:
        """The calls, or those of units, that have made the tensors in a piece of state."""
        record, found = self._record, list[int]()
        for tensor in state_at(record.program, place):
            value, unit = self.current.get(tensor), self.hidden.get(tensor)
            if value is not None:
                found.append(record.values[value].maker)
            elif unit is not None:
                found += [n for n, event in enumerate(record.events) if event.address[0] == unit]
        return found

    def references(self, given: Any) -> Any:
        """Arguments with references in place of tensors; packed sequences become plain tuples."""

        def reference(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                return tuple(map(reference, value))
            if not isinstance(value, torch.Tensor):
                return value
            found: Any = self.current.get(value)
            found = self.names.get(id(value)) if found is None else found
            return TensorReference(found, shape_of(value), value.dtype)

        return pytree.tree_map(reference, given, is_leaf=lambda v: isinstance(v, PackedSequence))

    def note_apart(self, result: Any, name: str, args: Any, given: Sequence[torch.Tensor]) -> None:
        """Note whether what a call returns, or writes to, is apart from the batch."""
        skipped = only_shape(name, args, given)
        apart = all(tensor is skipped or self.is_apart(tensor) for tensor in given)
        for tensor in tensors_in(result):
            self.apart[tensor] = apart
        if given and not apart and writes_first(name):
            self.apart[given[0]] = False

    def is_apart(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is independent of the batch."""
        known = self.apart.get(tensor)
        return known if known is not None else id(tensor) in self.names


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether the size of a tensor is known."""
    return type(tensor) is not Absent or not tensor.is_unknown


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; (-1,) if it is not known."""
    return tuple(tensor.shape) if is_known(tensor) else (-1,)


def state_at(program: UserProgram, place: StatePlace) -> list[torch.Tensor]:
    """The tensors in a piece of the program's state."""
    return tensors_in(value_at(place_of_state(program, place)))


def held_here(tensor: torch.Tensor) -> str:
    """A tensor in words: which attribute of which module whose code runs, if of any."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            for name, own in own_parameters(owner).items():
                if own is tensor:
                    return f"'{name}' of a {type(owner).__name__}"
        frame = frame.f_back
    return f"a tensor of shape {tuple(tensor.shape)}"


def only_shape(name: str, args: Any, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The argument of which a call reads only the shape, if there is one."""
    place = SHAPE_ONLY.get(name)
    found = args[place] if place is not None and place < len(args) else None
    if not isinstance(found, torch.Tensor) or sum(tensor is found for tensor in given) > 1:
        return None  # in x.view_as(x) the values are read too
    return found
