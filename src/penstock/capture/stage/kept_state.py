"""State that forward changes between units, kept for each stage of a process.

    class Net:  forward:  self.calls += 1; ...

Stages of one process share the user's module objects. Each stage runs that line, and must find the
counter as its own last run left it, or it would count once for each stage. What the user sets in
between reaches all stages.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.capture.record.model_state import StatePlace
from penstock.capture.record.user_program import UserProgram
from penstock.torch_internals import own_buffers, write_count

__all__ = ["KeptState", "Place", "changed_by", "copied", "place_of", "put", "value_at"]

Place = tuple[dict[str, Any], str]
"""The dict that holds a piece of state, and its key there."""

MISSING: Any = object()
"""The attribute does not exist."""

_UNSET: Any = object()


def place_of(program: UserProgram, place: StatePlace) -> Place:
    """Where a piece of state is in the user's own model."""
    module = program.module(place.path)
    return (own_buffers(module) if place.kind == "buffer" else module.__dict__), place.key


def value_at(place: Place) -> Any:
    """The value, or `MISSING`."""
    return place[0].get(place[1], MISSING)


def put(place: Place, value: Any) -> None:
    """Set a value; `MISSING` removes it."""
    if value is MISSING:
        place[0].pop(place[1], None)
    else:
        place[0][place[1]] = value


def copied(value: Any) -> Any:
    """A value that later writes to a tensor do not change."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def changed_by(before: Any, after: Any, now: Any) -> Any:
    """``now`` with the change from ``before`` to ``after``: numbers are counted further."""
    if after is before:
        return now
    numbers = all(type(value) in (int, float) for value in (before, after, now))
    return now + (after - before) if numbers else after


class KeptState:
    """The state at ``places`` of the user's model, kept for each stage."""

    def __init__(self, program: UserProgram, places: Sequence[StatePlace] = ()) -> None:
        self.places = [place_of(program, place) for place in places]
        self.modes: list[tuple[nn.Module, bool]] = []
        """Training modes before an evaluation that is going on."""
        self.starts_training = not program.model.training
        """The model was captured in evaluation mode, and has not been trained since."""
        self._left: list[tuple[Any, int] | None] = [None] * len(self.places)
        self._of_user: list[Any] = [MISSING] * len(self.places)
        self._of_stage: dict[Hashable, list[Any]] = {}

    @contextmanager
    def set_aside(self, further: Sequence[Place]) -> Iterator[None]:
        """Within, stages may run; afterwards the state, here and at ``further``, is as before."""
        places = (*self.places, *further)
        before = [(place, value_at(place), copied(value_at(place))) for place in places]
        kept = list(self._left), list(self._of_user)
        of_stage = {stage: list(values) for stage, values in self._of_stage.items()}
        try:
            yield
        finally:
            self._left, self._of_user = kept
            self._of_stage = of_stage
            with torch.no_grad():
                for place, value, content in before:
                    if isinstance(value, torch.Tensor):
                        value.copy_(content)
                    put(place, value)

    def enter(self, stage: Hashable) -> None:
        """Put what this stage's last run left in place; what the user has set since goes first."""
        own = self._of_stage.setdefault(stage, [_UNSET] * len(self.places))
        for i, place in enumerate(self.places):
            now = value_at(place)
            if not _is_as_left(now, self._left[i]):
                self._of_user[i] = now
                for values in self._of_stage.values():
                    values[i] = _UNSET
            if own[i] is _UNSET:
                own[i] = copied(self._of_user[i])
            put(place, own[i])

    def leave(self, stage: Hashable) -> None:
        """Keep what this stage's run has left."""
        own = self._of_stage[stage]
        for i, place in enumerate(self.places):
            own[i] = value_at(place)
            version = write_count(own[i]) if isinstance(own[i], torch.Tensor) else 0
            self._left[i] = own[i], version


def _is_as_left(now: Any, left: tuple[Any, int] | None) -> bool:
    if left is None or now is not left[0]:
        return False
    return not isinstance(now, torch.Tensor) or write_count(now) == left[1]
