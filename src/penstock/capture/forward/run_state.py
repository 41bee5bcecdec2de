"""State of the model that a stage's runs find and leave, for their replays and backwards.

forward of micro-batch 0      begins with the state at the step's begin: kept for its replay
forward of micro-batch 1      ...
backward of micro-batch 0     finds what its own forward has left
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.capture.forward.kept_state import KeptState, changed_by, copied
from penstock.capture.forward.partial_forward import RunContext, StageTask
from penstock.capture.record.model_and_loss import IN_ONE_PROCESS
from penstock.capture.record.model_state import place_of, put, value_at


class RunState:
    """State that forward changes, between units and in those of a stage, by micro-batch.

    State of units of other stages, and of buffers ``elsewhere``, is not this stage's.
    """

    def __init__(self, task: StageTask, kept: KeptState, elsewhere: Collection[str]) -> None:
        part = task.part
        self.key = part.first, part.last
        """The stages of a process share what is between units; this one's is found by the key."""
        self._kept, self._probes = kept, task.probes
        own = [
            place_of(task.program, place)
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
        if not self._probes:
            self._kept.enter(self.key)
        now = self._now()
        if self._probes:
            self._put(map(copied, now))
            return now
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
        if not self._probes:
            self._kept.leave(self.key)

    @contextmanager
    def in_backward(self, name: Any) -> Iterator[None]:
        """Put back the state that a run has left under this name, if one has.

        The user's code also runs in a backward: autograd functions, hooks, checkpoints. It finds
        what its own forward has left, however many others have run since. What it changes stays.
        """
        left = self._left.pop(name, None)
        if left is None:
            with IN_ONE_PROCESS:
                yield
            return
        self._kept.enter(self.key)
        now = self._now()
        self._put(left)
        try:
            with IN_ONE_PROCESS:
                yield
        finally:
            self._put(map(changed_by, left, self._now(), now))
            self._kept.leave(self.key)

    @contextmanager
    def on_copies(self) -> Iterator[None]:
        """Within, what is changed is put back."""
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
            put(place, value)
