"""The messages between the replicas of two stages, for one micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import merge
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.cluster.cluster import Cluster
from penstock.core.native import BoundaryTimes, PairTimes
from penstock.costs.layer_sums import LayerSums
from penstock.plan.row_split import row_overlaps
from penstock.profile.model_profile import Edge, first_of_each_tensor
from penstock.simulate.stage_work import StageWork

Whole: TypeAlias = npt.NDArray[np.int64]

Rows: TypeAlias = tuple[int, int, int]
"""Sender replica, receiver replica, and the number of rows sent between them."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The messages between replica ``sender`` of the producer and ``receiver`` of the consumer.

    Activations are sent down, gradients up. ``returns``: there is a message up. ``port_down`` and
    ``port_up``: that message uses the ports of the hosts.
    """

    sender: int
    receiver: int
    forward_s: float
    forward_bytes: float
    returns: bool
    backward_s: float
    backward_bytes: float
    port_down: bool
    port_up: bool


@dataclass(frozen=True, eq=False)
class Boundary:
    """All pairs of a producer and a consumer stage, sorted."""

    pairs: tuple[Pair, ...]

    @cached_property
    def times(self) -> BoundaryTimes:
        """The same for the core's engine."""
        return BoundaryTimes(
            [
                PairTimes(
                    p.sender,
                    p.receiver,
                    p.forward_s,
                    p.backward_s,
                    p.returns,
                    p.port_down,
                    p.port_up,
                )
                for p in self.pairs
            ]
        )


@dataclass(slots=True)
class Load:
    """The tensors that one pair sends in one direction: their number and their bytes."""

    messages: int = 0
    bytes: float = 0.0

    def add(self, size_bytes: float) -> None:
        """Add a tensor; one without bytes is not sent."""
        if size_bytes > 0:
            self.messages += 1
            self.bytes += size_bytes

    def seconds(self, cluster: Cluster, source: int, target: int) -> float:
        """Seconds of all tensors, each with its own latency; zero within a device."""
        if not self.messages or source == target:
            return 0.0
        sent_s = self.bytes / cluster.bandwidth(source, target)
        return self.messages * cluster.latency(source, target) + sent_s


def boundary_between(
    producer: StageWork, consumer: StageWork, sums: LayerSums, cluster: Cluster
) -> Boundary:
    """The messages between two stages for each micro-batch.

    The stage that makes a tensor sends it directly to each stage that reads it, once. Each replica
    sends each replica the rows that both hold. A tensor without rows is sent whole; receiver ``j``
    gets it from sender ``j`` modulo the number of senders. The tensors of one pair and direction
    are one message, in which each tensor has its own latency. Neighbouring stages depend on each
    other even if they exchange no tensor (`penstock.schedule.action`); that message takes no
    time. Neither does a message within a device that holds both stages.
    """
    loads: dict[tuple[int, int], tuple[Load, Load]] = {}
    overlaps = rows_shared(producer.slices, consumer.slices)
    neighbours = producer.layers.stop == consumer.layers.start
    returning = {(i, j) for i, j, _ in overlaps} if neighbours else set[tuple[int, int]]()
    for i, j in returning:
        loads[i, j] = Load(), Load()
    for edge in edges_between(producer.layers, consumer.layers, sums):
        for i, j, rows in pairs_of_whole(producer, consumer) if edge.goes_whole else overlaps:
            down, up = loads.setdefault((i, j), (Load(), Load()))
            down.add(edge.bytes.at(rows))
            if (size_bytes := edge.gradient_bytes.at(rows)) > 0:
                up.add(size_bytes)
                returning.add((i, j))
    return Boundary(
        tuple(
            pair_of(producer, consumer, ends, load, ends in returning, cluster)
            for ends, load in sorted(loads.items(), key=lambda item: item[0])
        )
    )


def pair_of(
    producer: StageWork,
    consumer: StageWork,
    ends: tuple[int, int],
    load: tuple[Load, Load],
    returns: bool,
    cluster: Cluster,
) -> Pair:
    source, target = producer.devices[ends[0]], consumer.devices[ends[1]]
    down, up = load
    return Pair(
        *ends,
        down.seconds(cluster, source, target),
        down.bytes,
        returns,
        up.seconds(cluster, target, source),
        up.bytes,
        cluster.uses_port(source, target),
        cluster.uses_port(target, source),
    )


@lru_cache(maxsize=1024)
def rows_shared(senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[Rows, ...]:
    """`row_overlaps`, cached: planners score many plans with the same few slices."""
    return tuple((o.sender, o.receiver, len(o.rows)) for o in row_overlaps(senders, receivers))


def pairs_of_whole(producer: StageWork, consumer: StageWork) -> tuple[Rows, ...]:
    """The pairs of a tensor without rows: one for each receiver."""
    senders = len(producer.devices)
    return tuple((j % senders, j, 1) for j in range(len(consumer.devices)))


def edges_between(producer: range, consumer: range, sums: LayerSums) -> tuple[Edge, ...]:
    """One edge for each tensor that is made in ``producer`` and read in ``consumer``."""
    return first_of_each_tensor(
        edge
        for edge in sums.profile.crossing[consumer.start]
        if edge.producer in producer and edge.consumer in consumer
    )


def connected_stages(
    stage_of_layer: Whole, producers: Whole, consumers: Whole
) -> Iterator[tuple[int, int]]:
    """All (producer, consumer) stages between which messages pass: neighbours and skip connections.

    ``producers`` and ``consumers`` are the layers at the ends of all edges that skip a layer.
    """
    stages = int(stage_of_layer[-1]) + 1
    before, after = stage_of_layer[producers], stage_of_layer[consumers]
    skips = np.unique((before * stages + after)[after > before + 1])
    neighbours = ((s, s + 1) for s in range(stages - 1))
    yield from merge(neighbours, (divmod(skip, stages) for skip in skips.tolist()))
