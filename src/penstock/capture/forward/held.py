"""Parameters and buffers that a stage holds, and absent tensors for the others while it runs."""

from collections.abc import Sequence
from typing import Any

import torch

from penstock.capture.forward.partial_forward import StageTask
from penstock.capture.record.absent import Absent, absent_like
from penstock.capture.record.model_state import Place
from penstock.torch_internals import forward_hooks, own_buffers


class HeldTensors:
    """Parameters and buffers of the model that are a stage's.

    ``alone``: parameters that the stage does not hold may be here, since other stages run in this
    process; they are absent while it runs. Where those have been released, nothing needs to be
    exchanged but what calls between units read.
    """

    def __init__(self, task: StageTask, *, alone: bool) -> None:
        program, record, part = task.program, task.record, task.part
        named = list(program.named_parameters())
        held = set(part.held)
        for path in part.paths:
            own = program.module(path).named_parameters(path, remove_duplicate=False)
            held |= {name for name, _ in own}
        here = {id(parameter) for name, parameter in named if name in held}
        self.names = frozenset(name for name, p in named if id(p) in here)
        """Names of the parameters that the stage holds."""
        read = {name for e in record.events if not e.is_unit for name in e.params}
        read_ids = {id(parameter) for name, parameter in named if name in read}
        self._exchanged: list[tuple[Place, Absent]] = []
        self.absent: dict[str, torch.Tensor] = {}
        """Tensors in the places of other stages' parameters while this one runs, by name."""
        places: set[tuple[int, str]] = set()
        for name, parameter in named:
            if id(parameter) in here or type(parameter) is Absent:
                continue
            place, key = program.places(name)
            if (id(place), key) in places:
                continue  # a module that is reached by two names
            places.add((id(place), key))
            if alone or id(parameter) in read_ids:
                shape, needs_grad = tuple(parameter.shape), parameter.requires_grad
                found = absent_like(shape, parameter.dtype, needs_grad, is_parameter=True)
                self._exchanged.append(((place, key), found))
                self.absent[name] = found
        # Hooks around a unit that is left out may write to its buffers: the old spectral norm's do.
        for path in record.counts.keys() - part.paths:
            module = program.module(path)
            if forward_hooks(module):
                for key, buffer in own_buffers(module).items():
                    if buffer is not None and type(buffer) is not Absent:
                        found = absent_like(tuple(buffer.shape), buffer.dtype)
                        self._exchanged.append(((own_buffers(module), key), found))
        self.buffers_elsewhere: set[str] = set()
        """Names of buffers that other stages write, from the batch or activations."""
        for name, numbers in record.local_buffers.items():
            if not any(part.first <= i < part.last for i in numbers):
                self.buffers_elsewhere.add(name)
                place = program.places(name)
                buffer = place[0][place[1]]
                self._exchanged.append((place, absent_like(tuple(buffer.shape), buffer.dtype)))

    def exchange(self) -> list[tuple[Place, Any]]:
        """Put the absent tensors in place; return what was there."""
        before: list[tuple[Place, Any]] = []
        for place, absent in self._exchanged:
            own = place[0][place[1]]
            absent.needs_grad = own.requires_grad
            before.append((place, own))
            place[0][place[1]] = absent
        return before


def undo_exchange(before: Sequence[tuple[Place, Any]]) -> None:
    """Put back what `Held.exchange` has returned."""
    for place, value in reversed(before):  # a module may be there under two names
        place[0][place[1]] = value
