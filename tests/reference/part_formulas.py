"""What the parts of a plan cost, written layer by layer: stages, messages and gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from penstock.cluster.cluster import Cluster, Device
from penstock.plan.plan import Stage
from penstock.plan.row_split import row_overlaps
from penstock.profile.model_profile import Edge, ModelProfile
from penstock.simulate.instances import StageUse

from .all_reduce import all_reduced_s
from .crossing import first_of_each_tensor
from .simpy_gathers import gathered_pass_s
from .stage_formula import StageFormula

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class PartFormula(StageFormula):
    """A stage as a schedule uses it; seconds and bytes are those of each replica ``j``.

    ``earlier`` are the layers of the stages before it on its devices, with its slices.
    """

    use: StageUse
    earlier: tuple[range, ...] = ()

    @property
    def sharding(self) -> str:
        return self.stage.sharding

    def device(self, j: int) -> Device:
        return self.problem.cluster.devices[self.stage.devices[j]]

    def sum_s(self, size_bytes: float) -> float:
        return all_reduced_s(self.problem.cluster, self.stage.devices, size_bytes)

    def read_of(self, j: int) -> float:
        """Seconds of any action at least: its chip reads the parameters that it does not hold."""
        held, device = self.parameter_bytes, self.device(j)
        streams = device.off_chip_bytes_per_s and held > device.on_chip_bytes
        return held / device.off_chip_bytes_per_s if streams else 0.0

    def layers_s(self, j: int, name: str, layers: range) -> float:
        costs = [getattr(self.profile.layers[layer], name) for layer in layers]
        return sum(cost.at(self.stage.slices[j]) for cost in costs) / self.device(j).speed

    def computed_s(self, j: int, name: str) -> float:
        return max(self.read_of(j), self.layers_s(j, name, self.stage.layers))

    def passed_s(self, j: int, name: str) -> float:
        """A pass; where parameters are divided, that of all replicas, which wait for messages."""
        if not self.gathers:
            return self.computed_s(j, name)
        replicas, step = range(self.stage.replicas), 1 if name == "forward_s" else -1
        works_s = [
            max(self.layers_s(k, name, range(layer, layer + 1)) for k in replicas)
            for layer in self.stage.layers
        ]
        messages_s = [self.sum_s(size) / 2 for size in self.layer_bytes]
        whole_s = gathered_pass_s(messages_s[::step], works_s[::step], step < 0)
        return max(self.read_of(j), whole_s)

    def begins_s(self, j: int, *, forward: bool) -> float:
        profile = self.profile
        again_s = profile.stage_forward_s if self.stage.by_block else 0.0
        own_s = profile.stage_forward_s if forward else profile.stage_backward_s + again_s
        return own_s / self.device(j).speed

    def message_s(self, j: int, size: str, *, read: bool) -> float:
        """Seconds that messages keep the device from computing: its inputs, or what it makes."""
        layers, device = self.stage.layers, self.device(j)
        made = (e for e in self.profile.edges if e.producer in layers and e.consumer >= layers.stop)
        ends = received_by(self.profile, layers, self.earlier) if read else made
        sizes = [
            getattr(edge, size).at(self.stage.slices[j]) for edge in first_of_each_tensor(ends)
        ]
        rate = device.message_bytes_per_s or float("inf")
        return device.message_s + sum(sizes) / rate if sum(sizes) else 0.0

    def seconds(self, j: int, kind: str) -> float:
        """Seconds of one action; R is the forward of the recomputed layers."""
        if kind == "W":
            return self.computed_s(j, "backward_weight_s")
        forward = kind in "FR"
        size = "bytes" if forward else "gradient_bytes"
        messages_s = sum(self.message_s(j, size, read=read) for read in (True, False))
        begins_s = self.begins_s(j, forward=forward) + self.statistics_s(forward=forward)
        if kind == "I":
            return self.computed_s(j, "backward_input_s") + begins_s + messages_s
        passed_s = self.passed_s(j, "forward_s" if forward else "backward_s") + begins_s
        return passed_s if kind == "R" else passed_s + messages_s

    def step_s(self, j: int) -> float:
        """The optimizer's step; predicting weights takes a third of one each time."""
        share = 1 / self.stage.replicas if self.gathers else 1.0
        whole_s = self.profile.step_s_per_byte * self.parameter_bytes * share
        return whole_s * (1 + self.use.predictions / 3) / self.device(j).speed

    @property
    def buckets(self) -> list[tuple[int, float]]:
        """(layer, bytes): going backwards, the layer at which each bucket is full."""
        if self.stage.replicas == 1 or not self.use.reduces or self.sharding == "parameters":
            return []
        found: list[tuple[int, float]] = []
        waiting, lowest = 0.0, 0
        for layer in reversed(self.stage.layers):
            size = self.profile.layers[layer].parameter_bytes
            waiting, lowest = waiting + size, layer if size else lowest
            if waiting >= BUCKET_BYTES:
                found.append((layer, waiting))
                waiting = 0.0
        return [*found, (lowest, waiting)] if waiting else found

    @property
    def segment_layers(self) -> list[int]:
        """Where the parts of the last backward end; the last one ends with the first layer."""
        ends = [layer for layer, _ in self.buckets]
        return ends if self.stage.layers.start in ends else [*ends, self.stage.layers.start]

    @property
    def shares(self) -> list[tuple[int, int, float, float]]:
        """Segment, buckets, and seconds and bytes of each; tied ones come with the last segment."""
        sizes = [(segment, size) for segment, (_, size) in enumerate(self.buckets)]
        if self.stage.replicas > 1 and self.use.reduces and self.sharding != "parameters":
            sizes += [
                (len(self.segment_layers) - 1, shared.bytes)
                for shared in self.profile.shared
                if shared.bytes and all(layer in self.stage.layers for layer in shared.layers)
            ]
        counts = [(segment, ceil(size / BUCKET_BYTES), size) for segment, size in sizes]
        return [(k, count, self.sum_s(size / count), size / count) for k, count, size in counts]

    def segments_s(self, j: int) -> list[float]:
        """The parts of the last action that makes gradients."""
        name = "backward_weight_s" if self.use.split else "backward_s"
        stops = pairwise((self.stage.layers.stop, *self.segment_layers))
        runs = [range(lower, upper) for upper, lower in stops]
        parts_s = [self.layers_s(j, name, run) for run in runs]
        if self.read_of(j) or self.gathers:
            whole_s = self.computed_s(j, name) if self.use.split else self.passed_s(j, name)
            sum_s = sum(parts_s)
            parts_s = [part_s * whole_s / sum_s for part_s in parts_s]
        if self.use.split:
            return parts_s
        for k, run in enumerate(runs):
            part = Stage(run, self.stage.devices, self.stage.slices, by_block=self.stage.by_block)
            parts_s[k] += replace(self, stage=part).statistics_s(forward=False)
        parts_s[0] += self.begins_s(j, forward=False)
        parts_s[0] += self.message_s(j, "gradient_bytes", read=False)
        parts_s[-1] += self.message_s(j, "gradient_bytes", read=True)
        return parts_s

    def memory(self, j: int) -> tuple[float, float, float, float]:
        """Bytes all the time; of a micro-batch with all saved, or with its inputs; workspace."""
        rows, layers, run = self.stage.slices[j], self.stage.layers, self.run
        casts = sum(layer.cast_bytes for layer in run)
        buffers = sum(layer.buffer_bytes for layer in run)
        copies, state = self.use.versions + 1, self.problem.optimizer_bytes_per_parameter_byte
        held = self.parameter_bytes * (copies + state)
        if self.sharding == "optimizer":
            held = self.parameter_bytes * (copies + state / self.stage.replicas)
        if self.sharding == "parameters":
            sizes = self.layer_bytes
            two = max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
            held = held / self.stage.replicas + 2 * two
        edges = received_by(self.profile, layers, self.earlier)
        return (
            held + buffers + (casts if self.use.versions == 1 else 0),
            sum(layer.saved_bytes.at(rows) for layer in run)
            + (casts if self.use.versions > 1 else 0),
            sum(edge.bytes.at(rows) for edge in edges),
            max(layer.workspace_bytes.at(rows) for layer in run),
        )


Message = tuple[float, float]
"""Seconds and bytes."""


def messages_between(
    profile: ModelProfile, cluster: Cluster, stages: Sequence[Stage], ends: tuple[int, int]
) -> dict[tuple[int, int], tuple[Message, Message | None]]:
    """Of each pair of replicas the message down and up: each tensor once, with its own latency."""
    producer, consumer = (stages[end] for end in ends)
    down: dict[tuple[int, int], list[float]] = {}
    up: dict[tuple[int, int], list[float]] = {}
    shared = [
        (o.sender, o.receiver, len(o.rows)) for o in row_overlaps(producer.slices, consumer.slices)
    ]
    if producer.layers.stop == consumer.layers.start:
        down |= {(i, j): [] for i, j, _ in shared}
        up |= {(i, j): [] for i, j, _ in shared}
    for edge in received_by(profile, consumer.layers, earlier_at_home(stages, ends[1])):
        if edge.producer not in producer.layers:
            continue
        whole = [(j % producer.replicas, j, 1) for j in range(consumer.replicas)]
        for i, j, rows in whole if edge.goes_whole else shared:
            down.setdefault((i, j), []).append(edge.bytes.at(rows))
            if edge.gradient_bytes.at(rows):
                up.setdefault((i, j), []).append(edge.gradient_bytes.at(rows))

    def message(source: int, target: int, sizes: list[float]) -> Message:
        seconds = sum(cluster.transfer_s(source, target, size) for size in sizes)
        return seconds, sum(sizes)

    found: dict[tuple[int, int], tuple[Message, Message | None]] = {}
    for i, j in sorted(down):
        above, below = producer.devices[i], consumer.devices[j]
        back = message(below, above, up[i, j]) if (i, j) in up else None
        found[i, j] = message(above, below, down[i, j]), back
    return found


def earlier_at_home(stages: Sequence[Stage], number: int) -> tuple[range, ...]:
    """The layers of the stages before a stage that are on its devices and have its slices."""
    own = stages[number]
    return tuple(
        stage.layers
        for stage in stages[:number]
        if (stage.devices, stage.slices) == (own.devices, own.slices)
    )


def received_by(profile: ModelProfile, layers: range, earlier: Sequence[range]) -> tuple[Edge, ...]:
    """Each tensor that comes from before a stage, but for those that earlier stages received."""
    known = {
        edge.made
        for edge in profile.edges
        for other in earlier
        if edge.producer < other.start and edge.consumer in other
    }
    return first_of_each_tensor(
        edge
        for edge in sorted(profile.edges, key=lambda edge: edge.consumer)
        if edge.producer < layers.start and edge.consumer in layers and edge.made not in known
    )
