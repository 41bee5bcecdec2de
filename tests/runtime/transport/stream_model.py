"""What every rank's host issues in an iteration, and whether devices ever finish it.

The programs are recorded from the real channels, the real transport of process groups, the real
gradient buckets, the real exchange of batch normalisation and the real units of divided parameters,
each on the communicators that the runtime makes for it. They are played under the rules of a
library of collectives, without any device:

- NCCL: the operations of a communicator run one after another, in the order in which a rank issues
  them. A send and its receive, or all ranks' parts of a collective, run together, when all are at
  the head of their queues and the kernels launched before them have ended. A wait makes later
  kernels wait, not the host; reading a number makes the host wait for all kernels, and after an
  action it waits for the kernels of some actions before.
- Gloo: a wait stops the host. A send ends when its receive is posted, and a collective when all
  ranks have issued it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from penstock.capture.contract import TensorSpec
from penstock.plan.ordering import schedule_refusal
from penstock.plan.plan import Plan
from penstock.runtime.clock import AHEAD, StepClock
from penstock.runtime.gradients import buckets
from penstock.runtime.gradients.buckets import GradientBuckets, make_groups
from penstock.runtime.program import StagePart, lower, places_of_rank
from penstock.runtime.stage import parameter_shards, shards
from penstock.runtime.stage.batch_norm import SynchronisedBatchNorm
from penstock.runtime.stage.parameter_shards import Unit
from penstock.runtime.stage.shards import copy_values
from penstock.runtime.transport import process_groups
from penstock.runtime.transport.channels import PipelineChannels
from penstock.runtime.transport.messages import (
    BoundaryTensors,
    RankMessages,
    messages_by_rank,
)
from penstock.runtime.transport.process_groups import GroupTransport
from penstock.schedule.registry import FAMILIES


def boundaries_of(stages: int, *, skips: bool = True, width: int = 3) -> list[BoundaryTensors]:
    """A tensor from each stage to the next, and a mask without a gradient to the last."""
    hidden = TensorSpec("hidden", (5, width), torch.float32, 0, requires_grad=True)
    mask = TensorSpec("mask", (5,), torch.bool, 0)
    found = [BoundaryTensors(s, s + 1, (hidden,)) for s in range(stages - 1)]
    return found + [BoundaryTensors(0, stages - 1, (mask,))] * (skips and stages > 2)


class Operation(NamedTuple):
    """Something that a host issues: its part in a message or collective, a wait, or kernels.

    ``group`` is a communicator: the backend, and the number of the call that made it. ``pair`` are
    the ends of a message, and (-1, -1) in a collective.
    """

    kind: Literal["send", "receive", "collective", "wait", "compute", "near", "sync"]
    group: str = ""
    pair: tuple[int, int] = (-1, -1)
    place: int = 0
    """Which message of its pair and group it is, which collective of its group, or which action."""
    name: str = ""

    @property
    def whole(self) -> tuple[object, ...]:
        """What all parts of a message or collective have in common."""
        return self.group, self.pair, self.place, self.name

    @property
    def by_gloo(self) -> bool:
        """Whether the host waits for it itself."""
        return self.group.startswith("gloo")


Program = list[Operation]


class RecordedGroup(str):
    """The name of a communicator, with its messages as `dist.ProcessGroup` has them."""

    __slots__ = ("recorder",)
    recorder: "Recorder"

    def send(self, _: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        return self.recorder.issue(Operation("send", self, (self.recorder.rank, peer)))

    def recv(self, _: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        return self.recorder.issue(Operation("receive", self, (peer, self.recorder.rank)))

    def allreduce(self, tensors: list[torch.Tensor]) -> SimpleNamespace:
        return self.recorder.all_reduce(tensors[0], self, async_op=True)


@dataclass
class Recorder:
    """Stands in for `torch.distributed` on one rank."""

    rank: int
    backend: str
    program: Program = field(default_factory=Program)
    counts: Counter[tuple[str, tuple[int, int]]] = field(default_factory=Counter)
    groups: int = 0
    actions: int = 0

    def new_group(self, ranks: Sequence[int], backend: str = "") -> str | None:
        """See `World.new_group`; all ranks count alike, since all make the same calls."""
        self.groups += 1
        if self.rank not in ranks or len(ranks) == 1:
            return None
        group = RecordedGroup(f"{backend or self.backend} {self.groups}")
        group.recorder = self
        if group.startswith("nccl"):
            self.all_reduce(torch.zeros(1), group)
        return group

    def all_reduce(
        self, tensor: torch.Tensor, group: str, async_op: bool = False
    ) -> SimpleNamespace:
        return self._collective(f"all-reduce of {tensor.numel()}", group, async_op)

    def reduce(
        self, tensor: torch.Tensor, target: int, group: str, async_op: bool
    ) -> SimpleNamespace:
        return self._collective(f"reduce of {tensor.numel()} to {target}", group, async_op)

    def broadcast(
        self, tensor: torch.Tensor, source: int, group: str, async_op: bool
    ) -> SimpleNamespace:
        return self._collective(f"broadcast of {tensor.numel()} from {source}", group, async_op)

    def all_gather(
        self, found: object, own: torch.Tensor, group: str, async_op: bool
    ) -> SimpleNamespace:
        return self._collective(f"gather or scatter of {own.numel()}", group, async_op)

    gather_into = reduce_into = all_gather

    def _collective(self, name: str, group: str, async_op: bool) -> SimpleNamespace:
        work = self.issue(Operation("collective", group, name=name))
        if not async_op:
            work.wait()
        return work

    def issue(self, operation: Operation) -> SimpleNamespace:
        key = operation.group, operation.pair
        operation = operation._replace(place=self.counts[key])
        self.counts[key] += 1
        self.program.append(operation)
        waiting = operation._replace(kind="wait")
        return SimpleNamespace(
            wait=lambda *_: self.program.append(waiting), is_completed=lambda: False
        )


STOOD_IN_FOR = (
    (process_groups, "dist"),
    (buckets, "dist"),
    (shards, "dist"),
    (parameter_shards, "gather_into"),
    (parameter_shards, "reduce_into"),
)


class RecordedClock(StepClock):
    """The clock of a rank's GPU: after each action the host waits for the one some before."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def paced(self, steps: Iterable[Any]) -> Iterator[Any]:
        """See `DeviceClock`."""
        for step in steps:
            yield step
            self._recorder.actions += 1
            self._recorder.program.append(Operation("near", place=self._recorder.actions))


@dataclass
class RecordedRank:
    """One rank of a plan, connected with the others as a `Worker` is."""

    number: int
    transport: GroupTransport
    buckets: GradientBuckets
    recorder: Recorder
    stages: dict[int, "RecordedStage"] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        """All that it has issued."""
        return self.recorder.program

    @property
    def clock(self) -> StepClock:
        """That of its device."""
        by_nccl = self.recorder.backend == "nccl"
        return RecordedClock(self.recorder) if by_nccl else StepClock()

    def channels(self, messages: RankMessages) -> PipelineChannels:
        """The real channels over the real transport."""
        clock, memory, stages = StepClock(), torch.device("cpu"), cast(Any, self.stages)
        return PipelineChannels(self.number, self.transport, stages, clock, messages, memory)

    def begin(self, parts: dict[int, StagePart]) -> None:
        """Begin an iteration."""
        self.buckets.zero()
        for number, stage in self.stages.items():
            stage.part = parts[number]

    def exchange(self, what: str = "the end of the iteration") -> Callable[[], object]:
        """Begin the step's exchange, whose numbers are read from the device."""
        self.program.append(Operation("sync"))
        return self.transport.announce([0.0], what)


@dataclass
class RecordedStage:
    """A stage that computes nothing, and exchanges what a real one does with its replicas.

    ``units`` are those of divided parameters. ``tensor_group`` divides its tensors. In the group
    ``weighed_in`` loss terms are counted after each forward. ``part`` says which is the last
    backward of an iteration.
    """

    stage: int
    received: Sequence[TensorSpec]
    sent: Sequence[TensorSpec]
    rank: RecordedRank
    parameters: Sequence[nn.Parameter]
    norm: SynchronisedBatchNorm | None
    units: Sequence[Unit]
    tensor_group: str | None
    weighed_in: str | None
    part: StagePart | None = None

    def has_work(self, kind: str) -> bool:
        """Always."""
        return True

    def work(self, kind: str) -> Callable[[int, object], Sequence[torch.Tensor]]:
        """See `StageRunner`."""
        # As many rows as a whole micro-batch has: only what is sent of them matters.
        made = [torch.zeros(spec.shape) for spec in self.sent if kind == "F"]
        made += [torch.zeros(spec.shape) for spec in self.received if kind in "BI"]

        def run(micro_batch: int, received: object) -> Sequence[torch.Tensor]:
            if kind in "FR":
                self._forward(kind)
            elif kind in "BI":
                self._backward(kind)
            else:
                self._compute(kind)
            part = self.part
            ends = [] if part is None else ["W" if micro_batch in part.halved else "B"]
            if part is not None and kind in ends and micro_batch == part.last_backward:
                self._complete_gradients()
            return made

        return run

    def _compute(self, kind: str) -> None:
        self.rank.program.append(Operation("compute", name=f"{kind} of stage {self.stage}"))
        if self.tensor_group is not None:
            self.rank.recorder.all_reduce(torch.zeros(2), self.tensor_group)

    def _gather(self, units: Sequence[Unit], end: Callable[[Unit], object]) -> None:
        """Use units one after another, each next one prefetched."""
        for unit, later in zip_longest(units, units[1:]):
            unit.gather()
            if later is not None:
                later.begin()
            end(unit)

    def _forward(self, kind: str) -> None:
        self._gather(self.units, Unit.free)
        self._compute(kind)
        if self.norm is not None:
            self.norm.sum_over_replicas(torch.zeros(3))
            # The number of values in the batch is read.
            self.rank.program.append(Operation("sync"))
        if self.weighed_in is not None:
            self.rank.recorder.all_reduce(torch.zeros(1), self.weighed_in)
            self.rank.program.append(Operation("sync"))

    def _backward(self, kind: str) -> None:
        self._gather(self.units[::-1], Unit.reduce)
        self._compute(kind)
        if self.norm is not None:
            self.norm.sum_over_replicas(torch.zeros(2))

    def _complete_gradients(self) -> None:
        with self.rank.buckets.launching(self.stage):
            for parameter in self.parameters:
                parameter.backward(torch.zeros_like(parameter))


def recorded_ranks(
    plan: Plan,
    boundaries: Sequence[BoundaryTensors],
    backend: str = "nccl",
    *,
    hasty: bool = False,
) -> Iterator[RecordedRank]:
    """The ranks of a plan, each to be run before the next is asked for.

    If ``hasty``, they begin as they go on later: with sums ahead of need.
    """
    real = [getattr(module, name) for module, name in STOOD_IN_FOR]
    try:
        for number in range(max(plan.ranks) + 1):
            recorder = Recorder(number, backend)
            for module, name in STOOD_IN_FOR:
                setattr(module, name, recorder if name == "dist" else getattr(recorder, name))
            rank = connected(plan, boundaries, recorder, max(plan.ranks) + 1)
            if hasty:
                rank.buckets.starts_early = True
            yield rank
    finally:
        for (module, name), value in zip(STOOD_IN_FOR, real, strict=True):
            setattr(module, name, value)


def connected(
    plan: Plan, boundaries: Sequence[BoundaryTensors], recorder: Recorder, size: int
) -> RecordedRank:
    """One rank with its groups, made in the order of `Worker`, and equal values on all replicas.

    Every stage has a weight. The first and the last one share another, as far as that is allowed.
    """
    world: Any = SimpleNamespace(
        rank=recorder.rank,
        size=size,
        backend=recorder.backend,
        timeout_s=1.0,
        new_group=recorder.new_group,
        device=torch.device("cpu"),
    )
    last, sharding = len(plan.stages) - 1, {stage.sharding for stage in plan.stages}
    uses: dict[str, tuple[int, ...]] = {f"weight {s}": (s,) for s in range(last + 1)}
    flushes = FAMILIES[plan.schedule].flushes
    if last and flushes and "parameters" not in sharding:
        uses["tied"] = 0, last
    device = plan.device_of(world.rank)
    own = plan.ranks_of(device) if device >= 0 else (world.rank,)
    places = {place.stage: place for place in places_of_rank(plan, world.rank)}
    weights = {n: nn.Parameter(torch.zeros(6)) for n, by in uses.items() if {*by} & places.keys()}

    divided = [s.devices for s in plan.stages if s.sharding == "parameters"]
    divisions = make_groups(world, divided or [plan.ranks_of(d) for d in plan.devices])
    units: dict[int, list[Unit]] = {}
    for stage in places if divided else ():
        ranks = plan.stages[stage].devices
        if plan.stages[stage].sharding == "parameters":
            shares: Any = SimpleNamespace(
                ranks=ranks,
                place=sorted(ranks).index(world.rank),
                group=divisions[ranks],
                world=world,
            )
            parts = [nn.Parameter(torch.zeros(6)), weights[f"weight {stage}"]]
            for parameter in parts:
                copy_values(parameter, ranks[0], shares.group, world)
            units[stage] = [Unit(f"part {n}", [p], shares) for n, p in enumerate(parts)]
            parts[0].grad = torch.zeros_like(parts[0])

    def holders(name: str, place: int) -> tuple[int, ...]:
        devices = dict.fromkeys(d for stage in uses[name] for d in plan.devices_of(stage))
        return tuple(rank for d in devices for rank in plan.ranks_of(d)[place : place + 1])

    everywhere = [holders(name, place) for place in range(len(own)) for name in uses]
    groups = make_groups(world, [*everywhere, *(() if plan.tensor_groups else plan.device_groups)])
    norm_groups: dict[tuple[int, ...], Any] = {}
    if not schedule_refusal(plan.schedule, norms=True) and not plan.tensor_groups:
        norm_groups = make_groups(world, plan.device_groups)
    sent = messages_by_rank(plan, size, boundaries, (), ())
    pairs = {(m.sender, m.receiver) for messages in sent for m in messages}
    transport = GroupTransport(world, pairs)
    copies = {
        name: own if set(uses[name]) & units.keys() else holders(name, own.index(world.rank))
        for name in weights
    }
    summed = GradientBuckets(
        world,
        {s: {n: p for n, p in weights.items() if s in uses[n]} for s in places},
        {name: uses[name] for name in weights},
        copies,
        groups,
        StepClock(),
        {name: held[0] for name, held in copies.items() if "optimizer" in sharding},
    )
    for name, held in sorted(copies.items()):
        if held in groups:
            copy_values(weights[name], held[0], groups[held], world)
    rank = RecordedRank(world.rank, transport, summed, recorder)
    for stage, place in places.items():
        ranks = plan.device_groups[place.group]
        norm = SynchronisedBatchNorm(norm_groups, ranks, place.replica)
        rank.stages[stage] = RecordedStage(
            stage,
            [t for b in boundaries if b.consumer == stage for t in b.tensors],
            [t for b in boundaries if b.producer == stage for t in b.tensors],
            rank,
            [p for n, p in weights.items() if stage in uses[n] and stage not in units],
            norm if ranks in norm_groups else None,
            units.get(stage, ()),
            str(divisions[own]) if plan.tensor_groups and own in divisions else None,
            None if flushes or stage != last or ranks not in groups else str(groups[ranks]),
        )
    return rank


def recorded_programs(
    plan: Plan,
    boundaries: Sequence[BoundaryTensors],
    *,
    backend: str = "nccl",
    training: bool = True,
    iterations: int = 1,
    rows: int = 0,
    hasty: bool = False,
) -> dict[int, Program]:
    """What every rank issues to be connected, and in iterations of ``rows`` samples (0: all)."""
    programs: dict[int, Program] = {}
    rows = rows or plan.global_batch
    for rank in recorded_ranks(plan, boundaries, backend, hasty=hasty):
        given = (rows, ()), rank.stages, rank.channels
        lowered = lower(plan, boundaries, rank.number, *given, training=training)
        for iteration in range(iterations):
            if iteration:
                rank.buckets.finish()
                rank.buckets.starts_early = True
                rank.exchange()()
            rank.begin(lowered.parts)
            lowered.run(rank.clock)
        if training:
            rank.buckets.finish()
        rank.exchange()()
        if training:
            rank.buckets.share_values()
        programs[rank.number] = rank.program
    return programs


def by_direction(programs: dict[int, Program]) -> dict[int, Program]:
    """The programs with a communicator for messages to higher ranks, and one for the others."""
    return with_groups(programs, lambda sender, receiver: "up" if sender < receiver else "down")


def by_pair(programs: dict[int, Program]) -> dict[int, Program]:
    """The programs with a communicator for each two ranks, as NCCL makes them for single sends."""
    return with_groups(programs, lambda *ends: f"pair {sorted(ends)}")


def with_groups(
    programs: dict[int, Program], name: Callable[[int, int], str]
) -> dict[int, Program]:
    """The programs with other communicators for messages, by their ends."""
    return {
        rank: [op._replace(group=name(*op.pair)) if op.pair[0] >= 0 else op for op in program]
        for rank, program in programs.items()
    }


def receives_first(programs: dict[int, Program]) -> dict[int, Program]:
    """The programs with all receives before everything else, a group for each directed pair."""
    return with_groups(
        {
            rank: sorted(program, key=lambda op: op.kind != "receive")
            for rank, program in programs.items()
        },
        lambda *ends: str(ends),
    )


@dataclass(frozen=True)
class Rules:
    """The rules of NCCL under which programs are played.

    ``made_by_first_use``: the first operation of a communicator stops the host until all ranks that
    use it have come to theirs. ``connected_by_first_message``: so does the first message from one
    rank to another, for these two. ``first_launch_waits``: the first launch of every action of a
    stage stops the host until the device is idle, since kernels are loaded or memory is allocated
    then. ``near``: the host is so few actions ahead.
    """

    made_by_first_use: bool = False
    connected_by_first_message: bool = False
    first_launch_waits: bool = False
    near: int = AHEAD


class Device:
    """One rank: its host's place in its program, and the queues of its device."""

    def __init__(self, program: Program) -> None:
        self.program, self.at = program, 0
        self.computing: list[Operation] = []
        self.computed = 0
        # How much was launched up to the end of each action, by its number.
        self.ends: dict[int, int] = {}
        # For each communicator its operations, each with how much was launched before it.
        self.queues: dict[str, list[tuple[Operation, int]]] = defaultdict(list)
        self.heads: Counter[str] = Counter()
        self.seen: set[str] = set()

    @property
    def computes(self) -> bool:
        """Whether kernels that were launched have not ended."""
        return self.computed < len(self.computing)

    @property
    def idle(self) -> bool:
        """Whether all that was issued is done."""
        return not self.computes and all(
            self.heads[group] == len(queue) for group, queue in self.queues.items()
        )

    def head(self, group: str) -> Operation | None:
        """The operation of a communicator that could run now."""
        queue, place = self.queues[group], self.heads[group]
        if place < len(queue) and queue[place][1] <= self.computed:
            return queue[place][0]
        return None


class Play:
    """All ranks, and what they have issued."""

    def __init__(self, programs: dict[int, Program], rules: Rules) -> None:
        self.rules = rules
        self.devices = {rank: Device(program) for rank, program in programs.items()}
        self.users = defaultdict[str, set[int]](set)
        for rank, program in programs.items():
            for operation in program:
                if operation.group:
                    self.users[operation.group].add(rank)
        self.done: set[tuple[object, ...]] = set()
        self.arrived = defaultdict[str, set[int]](set)
        self.met = defaultdict[tuple[str, tuple[int, int]], set[int]](set)
        self.issued = defaultdict[tuple[object, ...], set[int]](set)

    def members(self, operation: Operation) -> set[int]:
        """The ranks that take part in a message or a collective."""
        return set(operation.pair) if operation.pair[0] >= 0 else self.users[operation.group]

    def issues(self, rank: int, device: Device, operation: Operation) -> bool:
        """Issue the next operation of a host; whether it could."""
        rules, group = self.rules, operation.group
        match operation.kind:
            case "send" | "receive" | "collective":
                self.arrived[group].add(rank)
                if operation.by_gloo:
                    self.issued[operation.whole].add(rank)
                    return True
                if rules.made_by_first_use and self.arrived[group] != self.users[group]:
                    return False
                if rules.connected_by_first_message and operation.pair[0] >= 0:
                    self.met[group, operation.pair].add(rank)
                    if len(self.met[group, operation.pair]) < 2:
                        return False
                device.queues[group].append((operation, len(device.computing)))
            case "wait":
                if operation.by_gloo:
                    return self.issued[operation.whole] == self.members(operation)
                device.computing.append(operation)
            case "near":
                device.ends[operation.place] = len(device.computing)
                return device.computed >= device.ends.get(operation.place - rules.near, 0)
            case "sync":
                return not device.computes
            case "compute":
                if operation.name not in device.seen:
                    if rules.first_launch_waits and not device.idle:
                        return False
                    device.seen.add(operation.name)
                device.computing.append(operation)
        return True

    def advance(self, device: Device) -> bool:
        """Let a device's kernels and transfers run as far as they can; whether anything ran."""
        moved = False
        while device.computes:
            operation = device.computing[device.computed]
            if operation.kind == "wait" and operation.whole not in self.done:
                break
            device.computed += 1
            moved = True
        for group in device.queues:
            while (head := device.head(group)) is not None:
                members = [self.devices[rank] for rank in self.members(head)]
                heads = [member.head(group) for member in members]
                if any(other is None or other.whole != head.whole for other in heads):
                    break
                for member in members:
                    member.heads[group] += 1
                self.done.add(head.whole)
                moved = True
        return moved


def stuck(programs: dict[int, Program], rules: Rules) -> str:
    """Which ranks never come to the end of their programs; empty if all do."""
    play, moved = Play(programs, rules), True
    while moved:
        moved = False
        for rank, device in play.devices.items():
            while device.at < len(device.program) and play.issues(
                rank, device, device.program[device.at]
            ):
                device.at += 1
                moved = True
            moved |= play.advance(device)
    return "; ".join(
        f"rank {rank} at {device.program[device.at : device.at + 1]}"
        for rank, device in play.devices.items()
        if device.at < len(device.program) or not device.idle
    )
