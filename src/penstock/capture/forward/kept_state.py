"""State that forward changes between units, kept for each stage of a process.

    class Net:  forward:  self.calls += 1; ...

Stages of one process share the user's module objects. Each stage runs that line, and must find the
counter as its own last run left it, or it would count once for each stage. What the user sets in
between reaches all stages. A replay finds what its first run found, and a backward what its own
forward has left, however many others have run since.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.capture.forward.partial_forward import RunContext, StageTask
from penstock.capture.record.model_and_loss import IN_ONE_PROCESS, UserProgram
from penstock.capture.record.model_state import (
    MISSING,
    Place,
    StatePlace,
    place_of_state,
    put_value,
    value_at,
)
from penstock.torch_internals import write_count

_UNSET: Any = object()


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
        self.program = program
        self.places = [place_of_state(program, place) for place in places]
        self._numbers = {place: number for number, place in enumerate(places)}
        self.modes: list[tuple[nn.Module, bool]] = []
        """Training modes before an evaluation that is in progress."""
        self.starts_training = not program.model.training
        """True if the model was captured in evaluation mode, and has not been trained since."""
        self.again: Any = None
        """Values that last stages keep for a second run of the loss, if it is to have one."""
        self.ends: dict[tuple[int, ...], Any] = {}
        """Values that they have kept, by micro-batch."""
        self.any_path = False
        """True if batches run in one piece, of which any path of the loss is right."""
        self.undoes = False
        """True if a step whose loss takes another path than recorded is undone at its end."""
        self.other_path = ""
        """Description of another path that the loss took in this iteration; empty if none."""
        self._left: list[tuple[Any, int] | None] = [None] * len(self.places)
        self._of_user: list[Any] = [MISSING] * len(self.places)
        self._of_stage: dict[Hashable, list[Any]] = {}

    def snapshot(self, further: Sequence[Place]) -> Callable[[], None]:
        """A function that puts the state, here and at ``further``, back to what it is now."""
        places = (*self.places, *further)
        before = [(place, value_at(place), copied(value_at(place))) for place in places]
        left, of_user = list(self._left), list(self._of_user)
        own = zip(map(value_at, self.places), left, strict=True)
        as_left = [_is_as_left(now, then) for now, then in own]
        of_stage = {stage: list(values) for stage, values in self._of_stage.items()}

        def put_back() -> None:
            self._left, self._of_user = list(left), list(of_user)
            self._of_stage = {stage: list(values) for stage, values in of_stage.items()}
            with torch.no_grad():
                for place, value, content in before:
                    if isinstance(value, torch.Tensor):
                        value.copy_(content)
                    put_value(place, value)
            for i, was in enumerate(as_left):
                if was:  # what is put back is no value that the user has set
                    self._note_left(i, before[i][1])

        return put_back

    def value_of(self, stage: Hashable, place: StatePlace) -> Any:
        """Return what a run of this stage would find at a place, also if only one stage has it."""
        now, number = value_at(place_of_state(self.program, place)), self._numbers.get(place)
        if number is None or not _is_as_left(now, self._left[number]):
            return now
        own = self._of_stage[stage][number] if stage in self._of_stage else _UNSET
        return self._of_user[number] if own is _UNSET else own

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
            put_value(place, own[i])

    def leave(self, stage: Hashable) -> None:
        """Keep what this stage's run has left."""
        own = self._of_stage[stage]
        for i, place in enumerate(self.places):
            own[i] = value_at(place)
            self._note_left(i, own[i])

    def _note_left(self, i: int, value: Any) -> None:
        self._left[i] = value, write_count(value) if isinstance(value, torch.Tensor) else 0


def _is_as_left(now: Any, left: tuple[Any, int] | None) -> bool:
    if left is None or now is not left[0]:
        return False
    return not isinstance(now, torch.Tensor) or write_count(now) == left[1]


class RunState:
    """State that forward changes, between units and in those of a stage, by micro-batch.

    State of units of other stages, and of buffers ``elsewhere``, is not this stage's.
    """

    def __init__(self, task: StageTask, kept: KeptState, elsewhere: Collection[str]) -> None:
        part = task.part
        self.key = part.first, part.last
        """The stages of a process share what is between units; this one's is found by the key."""
        self._kept = kept
        own = [
            place_of_state(task.program, place)
            for unit, place in task.recorded.unit_changes
            if (unit in part.paths if unit else place.name not in elsewhere)
        ]
        self._places = (*kept.places, *own)
        self.is_any = bool(self._places)
        self._before: dict[Any, list[Any]] = {}
        self._left: dict[Any, list[Any]] = {}

    def share(self, other: "RunState") -> None:
        """Keep state for replays and backwards where another form of this stage finds it."""
        self._before, self._left = other._before, other._left

    def enter(self, context: RunContext) -> list[Any] | None:
        """Put the state before a run in place, of a replay that of the first run.

        Returns what to put back when it ends.
        """
        self._kept.enter(self.key)
        now = self._now()
        if context.replay:
            self._put(map(copied, self._before.pop(context.micro_batch)))
            return now
        if context.keep:
            self._before[context.micro_batch] = [copied(value) for value in now]
        return now if context.trial else None

    def leave(self, context: RunContext, after: list[Any] | None) -> None:
        """Keep what a run has left, and put back what `enter` returned."""
        if context.returns:
            self._left[context.micro_batch] = self._now()
        if after is not None:
            self._put(after)
        self._kept.leave(self.key)

    @contextmanager
    def in_backward(self, name: Any) -> Iterator[None]:
        """Put back the state that a run has left under this name, if one has.

        The user's code also runs in a backward: autograd functions, hooks, checkpoints. It finds
        what its own forward has left, however many others have run since. What it changes stays.
        """
        left = self._left.pop(name, None)
        with IN_ONE_PROCESS:
            if left is None:
                yield
                return
            self._kept.enter(self.key)
            now = self._now()
            self._put(left)
            try:
                yield
            finally:
                self._put(map(changed_by, left, self._now(), now))
                self._kept.leave(self.key)

    @contextmanager
    def on_copies(self) -> Iterator[None]:
        """Put back at the end what is changed."""
        before = self._now()
        try:
            self._put(map(copied, before))
            yield
        finally:
            self._put(before)

    def _now(self) -> list[Any]:
        return [value_at(place) for place in self._places]

    def _put(self, values: Iterable[Any]) -> None:
        for place, value in zip(self._places, values, strict=True):
            put_value(place, value)
