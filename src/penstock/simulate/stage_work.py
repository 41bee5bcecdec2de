"""The work of one stage of a plan in an iteration: seconds and bytes of its replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import add
from typing import NamedTuple

from penstock.cluster.cluster import Cluster, Device
from penstock.cluster.collectives import norm_sums_s
from penstock.core.native import ReplicaTimes, StageTimes
from penstock.costs.layer_sums import LayerSums
from penstock.costs.sharding import gathered_s, step_share
from penstock.plan.plan import Stage
from penstock.profile.model_profile import Affine, Edge, first_of_each_tensor
from penstock.schedule.action import ACTION_KINDS, ActionKind
from penstock.simulate.gradients import (
    GradientShare,
    Ports,
    group_ports,
    seconds_of_buckets,
    shares_of_stage,
)
from penstock.simulate.instances import StageUse
from penstock.simulate.stage_memory import StageMemory, stage_memory

PREDICTION_SHARE = 1 / 3
"""Time of predicting weights as a fraction of an optimizer step, by memory traffic.

SGD with momentum: a prediction reads weights and momentum and writes weights, 3 passes. A step
clears gradients, computes their norm and scales them (4 passes), then reads gradients, momentum and
weights and writes the last two (5 passes).
"""


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """Seconds of one replica for each micro-batch, and its memory.

    ``segments_s`` are the parts of its last action that makes gradients (B, or W if the backward is
    split), cut where gradients are complete.

        seconds = layer seconds of its rows / speed, at least parameter bytes / off-chip rate

    The off-chip rate counts if the parameters exceed the on-chip memory: then every action reads
    them again. What the device itself needs for the messages of an action comes on top, and so does
    the exchange of batch norm's statistics, during which all replicas wait.
    """

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    recompute_s: float
    step_s: float
    segments_s: tuple[float, ...]
    memory: StageMemory

    def seconds(self, kind: ActionKind) -> float:
        """Seconds of one action at full speed; R is the forward of the recomputed layers."""
        match kind:
            case "F":
                return self.forward_s
            case "R":
                return self.recompute_s
            case "B":
                return self.backward_s
            case "I":
                return self.backward_input_s
            case "W":
                return self.backward_weight_s


@dataclass(frozen=True, eq=False)
class StageWork:
    """One instance of a stage on its devices; ``number`` identifies it in a `Catalogue`.

    Segment ``k`` of the last backward ends at layer ``segment_layers[k]``. ``shares`` are the
    gradients that the replicas reduce among themselves through ``ports``. ``device_bytes`` is the
    memory of each device. ``memory_limits`` are the distinct pairs of a replica's memory and its
    device's memory.
    """

    number: int
    layers: range
    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    slices: tuple[int, ...]
    overlaps: tuple[bool, ...]
    streams_messages: tuple[bool, ...]
    replicas: tuple[ReplicaWork, ...]
    device_bytes: tuple[float, ...]
    memory_limits: tuple[tuple[StageMemory, float], ...]
    segment_layers: tuple[int, ...]
    shares: tuple[GradientShare, ...]
    ports: Ports

    @cached_property
    def times(self) -> StageTimes:
        """The same for the core's engine."""
        buckets = [0] * len(self.segment_layers)
        for share in self.shares:
            buckets[share.segment] += share.buckets
        rules = zip(self.devices, self.hosts, self.overlaps, self.streams_messages, strict=True)
        replicas = [
            ReplicaTimes(*rule, [*map(work.seconds, ACTION_KINDS), work.step_s], work.segments_s)
            for rule, work in zip(rules, self.replicas, strict=True)
        ]
        seconds = seconds_of_buckets(self.shares)
        return StageTimes(replicas, buckets, seconds, self.ports.outgoing, self.ports.incoming)


def summed_last(work: StageWork) -> StageWork:
    """The same work where all gradients wait for the end of the last backward."""
    return replace(
        work,
        replicas=tuple(replace(r, segments_s=(sum(r.segments_s),)) for r in work.replicas),
        segment_layers=work.segment_layers[-1:],
        shares=tuple(replace(share, segment=0) for share in work.shares),
    )


def stage_work(
    number: int,
    stage: Stage,
    use: StageUse,
    sums: LayerSums,
    cluster: Cluster,
    *,
    optimizer_bytes_per_parameter_byte: float,
) -> StageWork:
    """The work of an instance of a stage; its devices are ``stage.devices`` of ``cluster``.

    Where they divide parameters, its messages are a part of its actions (`gathered_passes`).
    """
    layers, devices = stage.layers, stage.devices
    stops, shares = (layers.start,), ()
    passes = gathered_passes(stage, sums, cluster) if stage.sharding == "parameters" else None
    if use.reduces and passes is None:
        stops, shares = shares_of_stage(layers, devices, sums, cluster)
    parameter_bytes = sums.parameter_bytes(layers)

    def norms_s(run: range) -> tuple[float, float]:
        return norm_sums_s(cluster, devices, sums.norms.of(run), sums.norm_channels.of(run))

    made: dict[Pace, ReplicaWork] = {}
    replicas: list[ReplicaWork] = []
    for device, rows in zip(devices, stage.slices, strict=True):
        kind = cluster.devices[device]
        least_s = kind.chip.read_s(parameter_bytes)
        pace = Pace(rows, kind.speed, least_s, message_seconds(kind, layers, rows, sums))
        if pace not in made:
            memory = stage_memory(
                stage, rows, sums, optimizer_bytes_per_parameter_byte, use.versions
            )
            passed = passes or own_passes(stage, sums, rows, kind.speed)
            made[pace] = replica_work(stage, use, pace, stops, sums, norms_s, passed, memory)
        replicas.append(made[pace])
    device_bytes = tuple(cluster.devices[device].memory_bytes for device in devices)
    limits = zip((replica.memory for replica in replicas), device_bytes, strict=True)
    return StageWork(
        number=number,
        layers=layers,
        devices=devices,
        hosts=tuple(cluster.host_index[device] for device in devices),
        slices=stage.slices,
        overlaps=tuple(cluster.devices[device].overlaps_communication for device in devices),
        streams_messages=tuple(cluster.devices[device].concurrent_passes for device in devices),
        replicas=tuple(replicas),
        device_bytes=device_bytes,
        memory_limits=tuple(dict.fromkeys(limits)),
        segment_layers=stops,
        shares=shares,
        ports=group_ports(cluster, devices) if shares else Ports(),
    )


class Passes(NamedTuple):
    """Seconds of a forward, and of a backward."""

    forward_s: float
    backward_s: float


def own_passes(stage: Stage, sums: LayerSums, rows: int, speed: float) -> Passes:
    """The sums of the layers' seconds for so many rows."""
    layers = stage.layers
    return Passes(sums.forward_s.of(layers, rows) / speed, sums.backward_s.of(layers, rows) / speed)


def gathered_passes(stage: Stage, sums: LayerSums, cluster: Cluster) -> Passes:
    """The passes of all replicas, whose layers wait for messages."""
    ways = (gathered_s(sums.profile, cluster, stage, forward=way) for way in (True, False))
    return Passes(*ways)


class MessageSeconds(NamedTuple):
    """Seconds that a device cannot compute because of the messages of a forward or backward."""

    forward_received_s: float = 0.0
    forward_sent_s: float = 0.0
    backward_received_s: float = 0.0
    backward_sent_s: float = 0.0


def message_seconds(device: Device, layers: range, rows: int, sums: LayerSums) -> MessageSeconds:
    """The seconds of a stage's messages for one micro-batch, of which each tensor is read once.

    Neighbours on the same device are not considered: their tensors are not sent at all.
    """
    if not (device.message_s or device.message_bytes_per_s):
        return MessageSeconds()
    before = [edge for edge in sums.profile.crossing[layers.start] if edge.consumer < layers.stop]
    after = [edge for edge in sums.profile.crossing[layers.stop] if edge.producer >= layers.start]

    def seconds(edges: Sequence[Edge], size: Callable[[Edge], Affine]) -> float:
        moved = sum(size(edge).at(rows) for edge in first_of_each_tensor(edges))
        if not moved:
            return 0.0
        rate = device.message_bytes_per_s
        return device.message_s + (moved / rate if rate else 0.0)

    return MessageSeconds(
        seconds(before, lambda edge: edge.bytes),
        seconds(after, lambda edge: edge.bytes),
        seconds(after, lambda edge: edge.gradient_bytes),
        seconds(before, lambda edge: edge.gradient_bytes),
    )


class Pace(NamedTuple):
    """What replicas of a stage differ in: rows of a micro-batch, the speed that divides all
    seconds, the least seconds of any action, and those of its messages."""

    rows: int
    speed: float
    least_s: float
    messages: MessageSeconds


def replica_work(
    stage: Stage,
    use: StageUse,
    pace: Pace,
    stops: Sequence[int],
    sums: LayerSums,
    norms_s: Callable[[range], tuple[float, float]],
    passes: Passes,
    memory: StageMemory,
) -> ReplicaWork:
    """The work of a replica of a stage whose last backward has segments that end at ``stops``.

    ``passes`` are the seconds of its layers, ``norms_s`` those that layers wait for batch norm's
    statistics, there and back.
    """
    layers = stage.layers
    rows, speed, least_s, messages = pace
    there_s, back_s = norms_s(layers)
    back_s += there_s if stage.by_block else 0.0
    begin_s = sums.profile.stage_forward_s / speed
    begin_back_s = sums.profile.stage_backward_s / speed
    if stage.by_block:
        # Each backward begins with the forward, whose layers are in the sums already.
        begin_back_s += begin_s
    forward_messages_s = messages.forward_received_s + messages.forward_sent_s
    backward_messages_s = messages.backward_received_s + messages.backward_sent_s
    backward_more_s = begin_back_s + backward_messages_s + back_s
    forward_s = max(least_s, passes.forward_s) + there_s + begin_s
    backward_s = max(least_s, passes.backward_s)
    weight_s = max(least_s, sums.backward_weight_s.of(layers, rows) / speed)
    layer_gradients_s = sums.backward_weight_s if use.split else sums.backward_s
    segments_s = tuple(
        layer_gradients_s.of(range(lower, upper), rows) / speed
        for upper, lower in pairwise((layers.stop, *stops))
    )
    if least_s or stage.sharding == "parameters":
        segments_s = stretched(segments_s, weight_s if use.split else backward_s)
    if not use.split:
        runs = pairwise((layers.stop, *stops))
        waits_s = (
            sum(norms_s(range(lower, upper))[0 if stage.by_block else 1 :]) for upper, lower in runs
        )
        segments_s = tuple(map(add, segments_s, waits_s))
        segments_s = with_messages(segments_s, messages)
        segments_s = (segments_s[0] + begin_back_s, *segments_s[1:])
    step_s = sums.profile.step_s_per_byte * sums.parameter_bytes(layers) * step_share(stage)
    return ReplicaWork(
        forward_s=forward_s + forward_messages_s,
        backward_s=backward_s + backward_more_s,
        backward_input_s=max(least_s, sums.backward_input_s.of(layers, rows) / speed)
        + backward_more_s,
        backward_weight_s=weight_s,
        recompute_s=forward_s,
        step_s=step_s * (1 + PREDICTION_SHARE * use.predictions) / speed,
        segments_s=segments_s,
        memory=memory,
    )


def with_messages(parts_s: Sequence[float], messages: MessageSeconds) -> tuple[float, ...]:
    """The parts of a backward: it receives before the first one, and sends after the last."""
    whole = list(parts_s)
    whole[0] += messages.backward_received_s
    whole[-1] += messages.backward_sent_s
    return tuple(whole)


def stretched(parts_s: Sequence[float], whole_s: float) -> tuple[float, ...]:
    """The parts of an action, scaled so that their sum is ``whole_s``."""
    sum_s = sum(parts_s)
    if not sum_s:
        return (*parts_s[:-1], whole_s)
    return tuple(part_s * whole_s / sum_s for part_s in parts_s)
