"""What every rank's host issues in an iteration, and whether devices ever finish it.

The programs are recorded from the real channels and the real transport of process groups. They are
played under the rules of a library of collectives, without any device:

- NCCL: the operations of a communicator run one after another, in the order in which a rank issues
  them. A send and its receive run together, when both are at the head of their queues and the
  kernels launched before them have ended. A wait makes later kernels wait, not the host.
- Gloo: a wait stops the host. A send ends when its receive is posted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch

from penstock.capture.stage_program import TensorSpec
from penstock.plan.plan import Plan
from penstock.runtime.clock import StepClock
from penstock.runtime.execute import execute, steps_of
from penstock.runtime.iteration import places_of, prepare_iteration
from penstock.runtime.transport import process_groups
from penstock.runtime.transport.channels import PipelineChannels, Places
from penstock.runtime.transport.messages import BoundaryTensors, RankMessages
from penstock.runtime.transport.process_groups import GroupTransport

__all__ = [
    "Operation",
    "Program",
    "Rules",
    "boundaries_of",
    "by_direction",
    "receives_first",
    "recorded_programs",
    "recorded_ranks",
    "stuck",
]


def boundaries_of(stages: int, *, skips: bool = True, width: int = 3) -> list[BoundaryTensors]:
    """A tensor from each stage to the next, and a mask without a gradient to the last."""
    hidden = TensorSpec("hidden", (5, width), torch.float32, 0, requires_grad=True)
    mask = TensorSpec("mask", (5,), torch.bool, 0)
    found = [BoundaryTensors(s, s + 1, (hidden,)) for s in range(stages - 1)]
    return found + [BoundaryTensors(0, stages - 1, (mask,))] * (skips and stages > 2)


class Operation(NamedTuple):
    """Something that a host issues: a message's end, a wait for one, or an action's kernels."""

    kind: Literal["send", "receive", "wait", "compute"]
    group: str = ""
    pair: tuple[int, int] = (0, 0)
    place: int = 0
    """Which message of its pair and group it is."""
    name: str = ""

    @property
    def message(self) -> tuple[object, ...]:
        """What both ends of a message have in common."""
        return self.group, self.pair, self.place


Program = list[Operation]


@dataclass
class Recorder:
    """Stands in for `torch.distributed` on one rank."""

    rank: int
    program: Program = field(default_factory=Program)
    counts: Counter[tuple[str, tuple[int, int]]] = field(default_factory=Counter)

    def isend(self, buffer: torch.Tensor, peer: int, group: str) -> SimpleNamespace:
        return self._issue("send", group, (self.rank, peer))

    def irecv(self, buffer: torch.Tensor, peer: int, group: str) -> SimpleNamespace:
        return self._issue("receive", group, (peer, self.rank))

    def _issue(
        self, kind: Literal["send", "receive"], group: str, pair: tuple[int, int]
    ) -> SimpleNamespace:
        place = self.counts[group, pair]
        self.counts[group, pair] += 1
        self.program.append(Operation(kind, group, pair, place))
        waiting = Operation("wait", group, pair, place)
        return SimpleNamespace(
            wait=lambda *_: self.program.append(waiting), is_completed=lambda: False
        )


class RecordedStage:
    """A stage that computes nothing and returns tensors of the right shapes."""

    def __init__(
        self,
        stage: int,
        received: Sequence[TensorSpec],
        sent: Sequence[TensorSpec],
        recorder: Recorder,
    ) -> None:
        self.stage, self.received, self.sent, self.recorder = stage, received, sent, recorder

    def work(self, kind: str) -> Callable[[int, object], Sequence[torch.Tensor]]:
        # As many rows as a whole micro-batch has: only what is sent of them matters.
        made = [torch.zeros(spec.shape) for spec in self.sent if kind == "F"]
        made += [torch.zeros(spec.shape) for spec in self.received if kind in "BI"]
        name = f"{kind} of stage {self.stage}"

        def run(micro_batch: int, received: object) -> Sequence[torch.Tensor]:
            self.recorder.program.append(Operation("compute", name=name))
            return made

        return run


@dataclass(frozen=True)
class RecordedRank:
    """One rank of a plan, whose operations go into ``program``."""

    number: int
    transport: GroupTransport
    stages: dict[int, RecordedStage]
    program: Program

    def channels(self, messages: RankMessages) -> PipelineChannels:
        """The real channels over the real transport."""
        places = {number: Places(s.received, s.sent) for number, s in self.stages.items()}
        clock, memory = StepClock(), torch.device("cpu")
        return PipelineChannels(self.number, self.transport, places, clock, messages, memory)


def recorded_ranks(
    plan: Plan, boundaries: Sequence[BoundaryTensors], backend: str = "nccl"
) -> Iterator[RecordedRank]:
    """The ranks of a plan, each to be run before the next is asked for."""
    size, real = max(plan.devices) + 1, process_groups.dist
    try:
        for number in range(size):
            recorder = Recorder(number)
            process_groups.dist = recorder  # type: ignore[assignment]
            groups = iter(("all", "sums") if backend == "nccl" else ("up", "down", "sums"))
            world = SimpleNamespace(
                rank=number,
                size=size,
                backend=backend,
                timeout_s=1.0,
                new_group=lambda *_, groups=groups: next(groups),
                device=torch.device("cpu"),
            )
            stages = {
                place.stage: RecordedStage(
                    place.stage,
                    [t for b in boundaries if b.consumer == place.stage for t in b.tensors],
                    [t for b in boundaries if b.producer == place.stage for t in b.tensors],
                    recorder,
                )
                for place in places_of(plan, number)
            }
            transport = GroupTransport(world)  # type: ignore[arg-type]
            yield RecordedRank(number, transport, stages, recorder.program)
    finally:
        process_groups.dist = real


def recorded_programs(
    plan: Plan,
    boundaries: Sequence[BoundaryTensors],
    *,
    backend: str = "nccl",
    training: bool = True,
    two_parts: bool = False,
) -> dict[int, Program]:
    """What every rank issues in one iteration; in ``two_parts``, its warm-up forwards apart."""
    programs: dict[int, Program] = {}
    for rank in recorded_ranks(plan, boundaries, backend):
        iteration = prepare_iteration(plan, boundaries, rank.number, plan.global_batch, training)
        channels = rank.channels(iteration.messages)
        steps = steps_of(iteration.order, rank.stages, channels)
        first = iteration.warm_up
        count = sum(action in first for action in iteration.order) if two_parts else 0
        if two_parts:
            channels.begin_with(first)
            execute(steps[:count], channels, StepClock(), drains=False)
            channels.go_on(first)
        else:
            channels.begin()
        execute(steps[count:], channels, StepClock())
        programs[rank.number] = rank.program
    return programs


def by_direction(programs: dict[int, Program]) -> dict[int, Program]:
    """The programs with a communicator for messages to higher ranks, and one for the others."""
    return {
        rank: [
            op._replace(group="up" if op.pair[0] < op.pair[1] else "down") if op.group else op
            for op in program
        ]
        for rank, program in programs.items()
    }


def receives_first(programs: dict[int, Program]) -> dict[int, Program]:
    """The programs with all receives before everything else, a group for each directed pair."""
    return {
        rank: [
            op._replace(group=str(op.pair)) if op.group else op
            for op in sorted(program, key=lambda op: op.kind != "receive")
        ]
        for rank, program in programs.items()
    }


@dataclass(frozen=True)
class Rules:
    """The rules under which programs are played.

    ``made_by_first_use``: the first operation of a communicator stops the host until all ranks that
    use it have come to theirs. ``first_launch_waits``: the first launch of every action of a stage
    stops the host until the device is idle, since kernels are loaded or memory is allocated then.
    ``waits_stop_the_host``: as with Gloo.
    """

    made_by_first_use: bool = False
    first_launch_waits: bool = False
    waits_stop_the_host: bool = False


class Device:
    """One rank: its host's place in its program, and the queues of its device."""

    def __init__(self, program: Program) -> None:
        self.program, self.at = program, 0
        self.computing: list[Operation] = []
        self.computed = 0
        # For each communicator its operations, each with how much was launched before it.
        self.queues: dict[str, list[tuple[Operation, int]]] = defaultdict(list)
        self.heads: Counter[str] = Counter()
        self.seen: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether all that was issued is done."""
        return self.computed == len(self.computing) and all(
            self.heads[group] == len(queue) for group, queue in self.queues.items()
        )

    def head(self, group: str) -> Operation | None:
        """The operation of a communicator that could run now."""
        queue, place = self.queues[group], self.heads[group]
        if place < len(queue) and queue[place][1] <= self.computed:
            return queue[place][0]
        return None


def stuck(programs: dict[int, Program], rules: Rules) -> str:
    """Which ranks never come to the end of their programs; empty if all do."""
    devices = {rank: Device(program) for rank, program in programs.items()}
    users = defaultdict[str, set[int]](set)
    for rank, program in programs.items():
        for operation in program:
            if operation.group:
                users[operation.group].add(rank)
    done: set[tuple[object, ...]] = set()
    issued: set[tuple[object, ...]] = set()
    arrived = defaultdict[str, set[int]](set)
    moved = True
    while moved:
        moved = False
        for rank, device in devices.items():
            while device.at < len(device.program):
                operation = device.program[device.at]
                if operation.kind in ("send", "receive"):
                    group = operation.group
                    arrived[group].add(rank)
                    if rules.made_by_first_use and arrived[group] != users[group]:
                        break
                    issued.add((operation.kind, *operation.message))
                    entry = operation, len(device.computing)
                    device.queues[group].append(entry)
                elif rules.waits_stop_the_host and operation.kind == "wait":
                    ends = [(kind, *operation.message) for kind in ("send", "receive")]
                    if not issued.issuperset(ends):
                        break
                elif operation.kind == "compute" and operation.name not in device.seen:
                    if rules.first_launch_waits and not device.idle:
                        break
                    device.seen.add(operation.name)
                    device.computing.append(operation)
                else:
                    device.computing.append(operation)
                device.at += 1
                moved = True
            moved |= advance(device, devices, done, in_order=not rules.waits_stop_the_host)
    return "; ".join(
        f"rank {rank} at {device.program[device.at : device.at + 1]}"
        for rank, device in devices.items()
        if device.at < len(device.program) or (not rules.waits_stop_the_host and not device.idle)
    )


def advance(
    device: Device,
    devices: dict[int, Device],
    done: set[tuple[object, ...]],
    *,
    in_order: bool,
) -> bool:
    """Let a device's kernels and messages run as far as they can; whether anything ran."""
    moved = False
    while device.computed < len(device.computing):
        operation = device.computing[device.computed]
        if in_order and operation.kind == "wait" and operation.message not in done:
            break
        device.computed += 1
        moved = True
    if not in_order:
        return moved
    for group in device.queues:
        while (head := device.head(group)) is not None:
            sender, receiver = head.pair
            peer = devices[receiver if head.kind == "send" else sender]
            other = peer.head(group)
            if other is None or other.message != head.message or other.kind == head.kind:
                break
            device.heads[group] += 1
            peer.heads[group] += 1
            done.add(head.message)
            moved = True
    return moved
