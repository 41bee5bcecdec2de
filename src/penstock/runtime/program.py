"""Program of one rank in an iteration: lowered once for batches of one size, run many times.

If batches have variable lengths, their size is the number of samples and the lengths.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.batch.part import Leaf, PartialLeaf, sliced
from penstock.capture.forward.stage_module import StageProgram
from penstock.device import copied_to
from penstock.errors import PenstockError, RunFailed
from penstock.plan.plan import Plan
from penstock.runtime.clock import StepClock
from penstock.runtime.micro_batches import BatchCut, cut_batch, forward_schedule, runnable_schedule
from penstock.runtime.processes.world import World
from penstock.runtime.stage.runner import (
    LossTerm,
    ModuleRunner,
    StageInputs,
    StageRunner,
    Tensors,
    Work,
)
from penstock.runtime.transport.channels import PipelineChannels
from penstock.runtime.transport.messages import (
    BoundaryTensors,
    RankMessages,
    messages_between_actions,
    messages_of_rank,
)
from penstock.runtime.transport.transport import Transport
from penstock.runtime.user_metrics import MetricSums
from penstock.schedule.action import Action, ActionKind
from penstock.schedule.shape import PipelineShape
from penstock.timeline.timeline import EventKind

SIZES_KEPT = 256
"""Number of the most recently used sizes whose programs are cached."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a rank: replica ``replica`` of stage ``stage``, on device group ``group``."""

    stage: int
    replica: int
    group: int


def places_of_rank(plan: Plan, rank: int) -> tuple[Place, ...]:
    """The places of ``rank`` in the plan, in stage order; empty if the plan does not use it."""
    groups = plan.device_groups
    device = plan.device_of(rank)
    if device < 0:
        return ()
    group = next(g for g, devices in enumerate(groups) if device in devices)
    held = plan.shape().stages_of(group)
    return tuple(Place(stage, groups[group].index(device), group) for stage in held)


@dataclass(frozen=True, slots=True)
class StagePart:
    """Part of one stage of a rank in an iteration.

    ``rows[m]`` are the rows of the batch that it computes in micro-batch ``m``. ``recomputed`` are
    the micro-batches whose forward runs again before the backward. ``last_backward`` is the
    micro-batch whose backward completes the stage's gradients. ``halved`` are the micro-batches
    with a backward in two halves.
    """

    rows: tuple[range, ...]
    recomputed: frozenset[int]
    last_backward: int
    halved: frozenset[int]


class PreparedAction(NamedTuple):
    """An action with the functions that it calls, looked up once for many iterations.

    It can also be work between actions, such as an update of the weights (``STEP``).
    """

    kind: EventKind
    stage: int
    micro_batch: int
    receive: Callable[[], Tensors]
    work: Callable[[int, Tensors], Tensors]
    send: Callable[[Tensors], None] | None


@dataclass(frozen=True)
class Program:
    """A schedule, lowered for one rank, batches of one size, and training or evaluation.

    ``steps`` are the rank's actions in order, ``messages`` those that it sends and receives, and
    ``channels`` carry them. ``parts`` are those of its stages. ``cut`` is the same on all
    ranks. One that ``begins`` opens the channels; others continue with what is under way.
    """

    cut: BatchCut
    training: bool
    lengths: LengthsOf
    parts: Mapping[int, StagePart]
    messages: RankMessages
    channels: PipelineChannels
    steps: tuple[PreparedAction, ...]
    begins: bool = True

    @property
    def size(self) -> tuple[int, ...]:
        """The number of samples, and the lengths."""
        return (self.cut.micro_batches[-1].stop, *self.lengths)

    def run(self, clock: StepClock) -> None:
        """Run its steps (`execute`)."""
        if self.begins:
            self.channels.begin()
        self.channels.proceed(self.messages.planned)
        execute(self.steps, self.channels, clock)

    def work(
        self,
        stage: int,
        leaves: Sequence[Leaf] | Mapping[int, Leaf],
        batch_inputs: Sequence[int],
        device: "DeviceCopies",
        *,
        last: bool = True,
        name: tuple[int, ...] = (),
    ) -> StageInputs:
        """The inputs of a stage: the rows that it reads of the leaves of the batch called ``name``.

        A replica without rows gets the first rows of the micro-batch, in case it must take part.
        The ``last`` batch of an iteration completes the gradients.
        """
        part = self.parts[stage]
        wanted = [leaves[index] for index in batch_inputs]
        rows = zip(part.rows, self.cut.micro_batches, strict=True)
        return StageInputs(
            tuple(tuple(device.rows(leaf, own, whole) for leaf in wanted) for own, whole in rows),
            tuple(len(rows) for rows in part.rows),
            part.recomputed,
            part.last_backward if last else -1,
            self.training,
            part.halved,
            self.lengths,
            tuple((*name, number) for number in range(len(part.rows))),
            part.rows,
            self.size[0],
        )


class DeviceCopies:
    """The rows of one batch on a rank's device; each slice is copied once for all its stages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[tuple[int, range, range], torch.Tensor] = {}
        self._leaves: dict[int, PartialLeaf] = {}

    def rows(self, leaf: Leaf, own: range, whole: range) -> torch.Tensor:
        """The rows that `sliced` returns, on the device. The leaf must live as long as this."""
        if leaf.device == self._device:
            return sliced(leaf, own, whole)
        if isinstance(leaf, PartialLeaf):
            # It has just the rows that this rank needs.
            if id(leaf) not in self._leaves:
                self._leaves[id(leaf)] = leaf.to(self._device)
            return sliced(self._leaves[id(leaf)], own, whole)
        key = id(leaf), own, whole
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = copied_to(self._device, sliced(leaf, own, whole))
        return found


def lower(
    plan: Plan,
    boundaries: Sequence[BoundaryTensors],
    rank: int,
    size: tuple[int, LengthsOf],
    stages: Mapping[int, "FedRunner"],
    open_channels: Callable[[RankMessages], PipelineChannels],
    *,
    training: bool,
) -> Program:
    """The program of ``rank`` for batches of ``size``: a number of samples, and lengths."""
    rows, lengths = size
    cut = cut_batch(plan, rows)
    micro_batches = len(cut.micro_batches)
    if training:
        schedule, shape = runnable_schedule(plan, micro_batches)
    else:
        # The plan's training order is not needed: it may take a search, or not fit this batch.
        shape = replace(replace(plan, micro_batches=micro_batches).shape(), recompute=())
        schedule = forward_schedule(shape)
    sized = [boundary.at(lengths) for boundary in boundaries]
    passed = messages_between_actions(plan, sized, schedule, cut)
    places = places_of_rank(plan, rank)
    order = tuple(schedule.of(places[0].group)) if places else ()
    messages = messages_of_rank(rank, schedule, shape, passed, order)
    parts = {place.stage: part_of_order(place, order, cut, shape) for place in places}
    channels = open_channels(messages)
    effective = [action for action in order if stages[action.stage].has_work(action.kind)]
    steps = prepared_steps(effective, stages, channels)
    if not training:
        owners = ((step, stages[step.stage]) for step in steps)
        steps = tuple(
            step._replace(work=tried(runner, step, rank))
            if isinstance(runner, ModuleRunner)
            else step
            for step, runner in owners
        )
    return Program(cut, training, lengths, parts, messages, channels, steps)


def prepared_steps(
    order: Sequence[Action], stages: Mapping[int, StageRunner], channels: PipelineChannels
) -> tuple[PreparedAction, ...]:
    """Prepare ``order``, one device's actions of a schedule, to be run repeatedly."""
    return tuple(
        PreparedAction(
            action.kind,
            action.stage,
            action.micro_batch,
            channels.receiver(action),
            stages[action.stage].work(action.kind),
            channels.sender(action),
        )
        for action in order
    )


def part_of_order(
    place: Place, order: Sequence[Action], cut: BatchCut, shape: PipelineShape
) -> StagePart:
    """Extract the part of the stage at ``place`` from the order of its rank."""

    own = [action for action in order if action.stage == place.stage]
    ends = [action.micro_batch for action in own if action.kind in "BW"]
    return StagePart(
        tuple(rows_at(place, number, cut, shape) for number in range(len(cut.micro_batches))),
        frozenset(action.micro_batch for action in own if action.kind == "R"),
        ends[-1] if ends else -1,
        frozenset(action.micro_batch for action in own if action.kind == "I"),
    )


def rows_at(place: Place, micro_batch: int, cut: BatchCut, shape: PipelineShape) -> range:
    """The rows of the batch that the stage at ``place`` computes of one micro-batch."""
    if shape.group_of(place.stage, micro_batch) != place.group:
        return range(0)
    return cut.rows(micro_batch, place.stage, place.replica)


def execute(steps: Iterable[PreparedAction], channels: PipelineChannels, clock: StepClock) -> None:
    """Run ``steps`` one after another; gradients accumulate in place.

    The loop uses no schedule by name: it only follows the actions. ``receive`` returns what the
    producers of an action sent. ``send`` returns at once. Compute is timed separately from waiting.
    Each step is requested only when the previous one is done. At its end the loop waits until
    everything is sent.
    """
    now, add = clock.now, clock.add
    for kind, stage, micro_batch, receive, work, send in clock.paced(steps):
        try:
            received = receive()
            start = now()
            result = work(micro_batch, received)
            add(kind, stage, micro_batch, start, now())
            if send is not None:
                send(result)
        except PenstockError:
            raise
        except Exception as cause:
            where = f"rank {channels.device}, stage {stage}, {kind}{micro_batch}"
            raise located(cause, where) from cause
    channels.drain()


def located(cause: Exception, where: str) -> RunFailed:
    """The error of a stage that raised another."""
    text = str(cause).strip().partition("\n")[0] or type(cause).__name__
    name = "KeyError: " * isinstance(cause, KeyError)  # its text is the key alone
    return RunFailed(f"{where}: {name}{text}{''.join(getattr(cause, '__notes__', ()))}")


def tried(runner: ModuleRunner, step: PreparedAction, rank: int) -> Work:
    """A forward in evaluation. The runner keeps what it raises, and sends zeros from then on.

    So all messages arrive, and the pipeline can continue. Where ranks gather parameters in it, they
    would wait for one another.
    """

    def work(micro_batch: int, received: Tensors) -> Tensors:
        if runner.failure is None:
            try:
                return step.work(micro_batch, received)
            except Exception as cause:
                if runner.gathers:
                    raise
                where = f"rank {rank}, stage {step.stage}, F{micro_batch}"
                known = isinstance(cause, PenstockError)
                runner.failure = cause if known else located(cause, where)
                runner.failure.__cause__ = None if known else cause
        return runner.blank(micro_batch)

    return work


class FedRunner(StageRunner, Protocol):
    """A stage that receives its rows before each iteration.

    ``loss_terms`` are those of the iteration. ``seed`` multiplies the gradients from which its
    backwards start.
    """

    loss_terms: list[LossTerm]
    seed: float

    def has_work(self, kind: ActionKind) -> bool:
        """Return whether actions of this kind have any effect in this stage."""
        ...

    def begin(self, work: StageInputs) -> None:
        """Take the inputs of the next iteration."""
        ...


Runner = TypeVar("Runner", bound=FedRunner)


class RankStages(Generic[Runner]):
    """The stages of one rank, with a program and a runner for each; none on unused ranks.

    ``metrics`` are computed from the outputs of the last stage.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        transport: Transport | None,
        clock: StepClock,
        *,
        boundaries: Sequence[BoundaryTensors],
        programs: Mapping[int, StageProgram],
        runners: Mapping[int, Runner],
        metrics: MetricSums | None,
    ) -> None:
        self.boundaries, self.programs, self.runners = boundaries, programs, runners
        self._plan, self._world, self._transport, self._clock = plan, world, transport, clock
        self.metrics = metrics
        self._lowered = lru_cache(SIZES_KEPT)(self._lower)

    @property
    def loss_terms(self) -> list[LossTerm]:
        """The loss terms of the latest batch that this rank computed."""
        return [term for runner in self.runners.values() for term in runner.loss_terms]

    def program(self, rows: int, lengths: LengthsOf = (), *, training: bool = True) -> Program:
        """The program for a batch of ``rows`` samples with these lengths."""
        return self._lowered(rows, lengths, training)

    def _lower(self, rows: int, lengths: LengthsOf, training: bool) -> Program:
        given = (rows, lengths), self.runners, self.channels
        return lower(self._plan, self.boundaries, self._world.rank, *given, training=training)

    def channels(self, messages: RankMessages) -> PipelineChannels:
        """Channels for the messages of one iteration."""
        world, to_others = self._world, (self._transport, self.programs, self._clock)
        return PipelineChannels(world.rank, *to_others, messages, world.device)

    def take(
        self,
        leaves: Mapping[int, Leaf],
        program: Program,
        *,
        last: bool = True,
        name: tuple[int, ...] = (),
    ) -> None:
        """Give the stages their rows of a batch; the ``last`` batch completes the gradients.

        ``name`` is unique to the batch in the run.
        """
        if self.metrics is not None:
            part = program.parts.get(len(self._plan.stages) - 1)
            self.metrics.take_batch(leaves, part.rows if part is not None else ())
        device = DeviceCopies(self._world.device)
        for stage, runner in self.runners.items():
            inputs = self.programs[stage].batch_inputs
            runner.begin(program.work(stage, leaves, inputs, device, last=last, name=name))

    def run(self, program: Program, seed: float = 1.0) -> list[LossTerm]:
        """Run the batch given to `take` through the pipeline; returns its loss terms.

        ``seed`` multiplies the gradient of the loss; see `Program.run`.
        """
        for runner in self.runners.values():
            runner.seed = seed
        program.run(self._clock)
        return self.loss_terms
