"""State of a model that a forward changes besides tensors: plain attributes and buffers.

A stage runs the user's own Python. If that counts, switches or remembers something in the model,
each stage of a process must find what *its* last run left (`penstock.capture.forward.kept_state`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.capture.record.absent import version_of
from penstock.capture.record.model_and_loss import UserProgram
from penstock.torch_internals import forward_hooks, own_buffers

PLAIN = (
    *(int, float, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size, type(Ellipsis)),
)
"""Types of values that are equal where they look equal."""

OF_EVERY_MODULE = frozenset([*nn.Module().__dict__, "forward"])
"""Attributes that are no state of the user's."""


Place = tuple[dict[str, Any], str]
"""The dict that holds a piece of state, and its key there."""

MISSING: Any = object()
"""The attribute does not exist."""


class StatePlace(NamedTuple):
    """Place of a piece of state: an ``attribute`` or a ``buffer`` of the module at ``path``."""

    kind: str
    path: str
    key: str

    @property
    def name(self) -> str:
        """Name in the model."""
        return f"{self.path}.{self.key}".removeprefix(".")


def place_of_state(program: UserProgram, place: StatePlace) -> Place:
    """Return the place of a piece of state in the user's own model."""
    module = program.module(place.path)
    return (own_buffers(module) if place.kind == "buffer" else module.__dict__), place.key


def value_at(place: Place) -> Any:
    """The value, or `MISSING`."""
    return place[0].get(place[1], MISSING)


def put_value(place: Place, value: Any) -> None:
    """Set a value; `MISSING` removes it."""
    if value is MISSING:
        place[0].pop(place[1], None)
    else:
        place[0][place[1]] = value


@contextmanager
def exchanged(values: Iterable[tuple[Place, Any]]) -> Iterator[None]:
    """Hold other values in these places; at the end put back the old ones."""
    before: list[tuple[Place, Any]] = []
    try:
        for place, value in values:
            before.append((place, value_at(place)))
            put_value(place, value)
        yield
    finally:
        for place, value in reversed(before):
            put_value(place, value)


def plain_state(program: UserProgram) -> dict[StatePlace, Any]:
    """Attributes and buffers of all modules; what is no plain value counts by identity."""
    found: dict[StatePlace, Any] = {}
    for path, module in program.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, PLAIN) and key != "training":
                found[StatePlace("attribute", path, key)] = value
            elif key not in OF_EVERY_MODULE and not isinstance(value, nn.Module):
                version = version_of(value) if isinstance(value, torch.Tensor) else 0
                # The value is held, so that no other gets its identity.
                found[StatePlace("attribute", path, key)] = id(value), value, version
        for key, buffer in own_buffers(module).items():
            if buffer is not None:
                found[StatePlace("buffer", path, key)] = (id(buffer), version_of(buffer))
    return found


def changed_places(
    before: Mapping[StatePlace, Any], after: Mapping[StatePlace, Any]
) -> set[StatePlace]:
    """The places whose values differ."""
    found: set[StatePlace] = set()
    for place in {*before, *after}:
        old, new = before.get(place, MISSING), after.get(place, MISSING)
        if old is not new and old != new:
            found.add(place)
    return found


def hook_counts(program: UserProgram) -> dict[str, int]:
    """Return the number of hooks on its forward that each module has, by name."""
    return {path: forward_hooks(module) for path, module in program.named_modules()}


def module_tree(program: UserProgram) -> dict[str, int]:
    """Return the identity of each module, by name."""
    return {path: id(module) for path, module in program.named_modules()}


def same_value(one: Any, other: Any) -> bool:
    """Return whether two results that are no tensors are the same; objects count as the same."""
    if type(one) is not type(other):
        return False
    if one is other or not isinstance(one, int | float | str | bool | bytes):
        return True
    return bool(one == other) or (one != one and other != other)
