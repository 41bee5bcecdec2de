"""A stage's part of a recorded program, what it runs for, and the inputs of one run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch

from penstock.capture.loss.loss_parts import LossAction
from penstock.capture.loss.loss_path import LossPath
from penstock.capture.record.calls import Address, ProgramRecord, RecordedCall
from penstock.capture.record.example import Recorded
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.sizes import BatchSize

Costs: TypeAlias = Literal["", "measured", "estimated"]
"""Kind of the costs for which a stage runs; empty if it does not run for these."""

Purpose: TypeAlias = Literal["training", "probing", "checking", "measured", "estimated"]
"""Purpose of a stage's run; see `StageTask`."""


@dataclass(frozen=True)
class ProgramPart:
    """Part of a record that is a stage's: events ``first`` to ``last``, and the calls of ``units``.

    ``received`` and ``sent`` are values, each with the address of its maker and its slot there;
    ``held`` are names of parameters and buffers. ``answers``, by address, are those of the example
    to questions whose tensors may be missing. ``to_end``: forward continues when all that is
    sent is made.
    """

    first: int
    last: int
    units: frozenset[tuple[str, int]] = frozenset()
    held: frozenset[str] = frozenset()
    received: Mapping[int, tuple[Address, Any]] = field(
        default_factory=dict[int, tuple[Address, Any]]
    )
    sent: Mapping[int, tuple[Address, Any]] = field(default_factory=dict[int, tuple[Address, Any]])
    answers: Mapping[Address, Any] = field(default_factory=dict[Address, Any])
    to_end: bool = False

    @cached_property
    def paths(self) -> frozenset[str]:
        """The paths of its units."""
        return frozenset(path for path, _ in self.units)

    def makes(self, number: int, event: RecordedCall) -> bool:
        """Return whether the stage makes a call: its own, or an earlier one that needs no stage."""
        return number < self.last and (number >= self.first or not event.depends)


@dataclass(frozen=True)
class StageTask:
    """A part of a recorded program, and the purpose for which it runs.

    ``actions`` say what is different about calls of the loss, by number of event, and ``path``
    which calls there must be. Who probes knows nothing of activations: the run finds the values of
    a whole step, for which all parameters are absent. Who checks leaves no block out, so that each
    call is seen.

    To find costs, a stage makes all calls of its range, and no others; it does not end when all is
    made that is sent, but where the next stage begins. If they are "estimated", activations have no
    values, so requests for them get the example's answers.
    """

    program: UserProgram
    recorded: Recorded
    part: ProgramPart
    actions: Mapping[int, Sequence[LossAction]]
    path: LossPath
    purpose: Purpose = "training"

    @property
    def record(self) -> ProgramRecord:
        """The record of the whole program."""
        return self.recorded.record

    @property
    def probes(self) -> bool:
        """Return whether it finds the values of a whole step."""
        return self.purpose == "probing"

    @property
    def costs(self) -> Costs:
        """The kind of costs that it finds, if any."""
        return self.purpose if self.purpose in ("measured", "estimated") else ""

    @cached_property
    def draws_in_all(self) -> bool:
        """Return whether all stages make calls, between units, that draw random numbers."""
        return any(event.random and not event.depends for event in self.record.events)

    @cached_property
    def draws_alike(self) -> bool:
        """Return whether all stages must draw the same in a micro-batch."""
        return self.draws_in_all or self.recorded.draws_python

    @cached_property
    def actions_of(self) -> Mapping[Address, list[LossAction]]:
        """The actions by address."""
        events = self.record.events
        return {events[number].address: list(own) for number, own in self.actions.items()}

    @cached_property
    def own_path(self) -> LossPath:
        """The segments of the path that this stage compares."""
        part = self.part
        if self.probes:
            return self.path
        return {
            anchor: segment.within(self.record.events, part.first)
            for anchor, segment in self.path.items()
            if segment.first < part.last and part.first < segment.last
        }

    def by_sample(self, path: str) -> bool:
        """Return whether a unit's calls grow in number with the batch; all are of one stage."""
        counts = {counts.get(path, 0) for counts in self.recorded.calls}
        own = sum(unit == path for unit, _ in self.part.units)
        return len(counts) > 1 and own in (0, self.record.counts[path])


@dataclass(slots=True)
class RunContext:
    """Identity of a run of a stage.

    ``name`` is unique to this micro-batch in the run, ``micro_batch`` among those that are kept
    at the same time. ``keep``: it will run again (``replay``), with the state that this run
    began with. ``returns``: its backward will run, with the state that this run leaves. ``trial``:
    what it changes of the model's state is put back.
    """

    name: tuple[int, ...] = ()
    micro_batch: int = 0
    keep: bool = False
    replay: bool = False
    returns: bool = False
    trial: bool = False


@dataclass(slots=True)
class StageRun:
    """Inputs of one run of a stage.

    ``seed`` makes equal what all stages draw between units in one micro-batch. ``own_seed`` is for
    what this stage alone draws then, and comes from the rank's own generator. ``whole`` are the
    values of the whole step by address, and ``share`` is the micro-batch's part of its samples.
    """

    size: BatchSize
    received: Mapping[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    context: RunContext = field(default_factory=RunContext)
    seed: int = 0
    own_seed: int = 0
    whole: Mapping[Address, Sequence[Any]] = field(default_factory=dict[Address, Sequence[Any]])
    share: float = 1.0
