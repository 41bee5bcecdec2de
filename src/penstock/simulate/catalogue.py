"""Caches the parts that plans consist of: the work of each stage and the messages of each pair."""

from collections.abc import Callable, Hashable, Sequence
from itertools import count, pairwise
from math import lcm
from typing import Generic, TypeVar

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_costs
from penstock.core.native import HostRules
from penstock.costs.layer_sums import LayerSums
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.schedule import Schedule
from penstock.simulate.gradients import (
    TiedGroup,
    bytes_of_own,
    group_ports,
    share_of,
    tied_parameters,
)
from penstock.simulate.instances import (
    Instances,
    StageUse,
    dealt,
    instances_of,
    stages_of_instances,
)
from penstock.simulate.stage_work import StageWork, stage_work
from penstock.simulate.transfers import Boundary, boundary_between, connected_stages
from penstock.simulate.workload import Parts, Workload

MOST_SECONDS = 1_000_000
"""Numbers kept for the stages of one cache generation; each takes about 40 bytes."""

MOST_PAIRS = 150_000
"""Pairs of replicas kept in one cache generation; each takes about 300 bytes."""


class Catalogue:
    """A cache of the parts of plans for one profile on one cluster."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        optimizer_bytes_per_parameter_byte: float = 2.0,
    ) -> None:
        self.cluster = cluster
        self.optimizer_bytes_per_parameter_byte = optimizer_bytes_per_parameter_byte
        self.sums = LayerSums(profile)
        self.shared = profile.shared
        skips = [edge for edge in profile.edges if edge.consumer - edge.producer > 1]
        self.producers = np.array([edge.producer for edge in skips], dtype=np.int64)
        self.consumers = np.array([edge.consumer for edge in skips], dtype=np.int64)
        self.hosts = tuple(
            HostRules(host.full_speed_devices, host.half_duplex, host.separate_links)
            for host in cluster.hosts
        )
        self.numbers = count()
        self.stages = Recent[object, StageWork](MOST_SECONDS, weight_of_stage)
        self.boundaries = Recent[object, Boundary](MOST_PAIRS, weight_of_boundary)
        self.ties = Recent[object, TiedGroup](MOST_PAIRS, lambda tie: len(tie.shares))

    def parts_of(self, plan: Plan, instances: Instances) -> Parts:
        """The parts of ``plan``, used as ``instances`` say."""
        stages = tuple(map(self.stage, stages_of_instances(plan), instances.uses))
        ends: list[tuple[int, int]] = list(pairwise(range(len(plan.stages))))
        ties: tuple[TiedGroup, ...] = ()
        if len(self.producers) or self.shared or instances.in_turn:
            lengths = [len(stage.layers) for stage in plan.stages]
            stage_of_layer = np.repeat(np.arange(len(plan.stages)), lengths)
            ends = list(connected_stages(stage_of_layer, self.producers, self.consumers))
            ties = self.ties_of(stages, stage_of_layer.tolist(), instances)
        if instances.in_turn:
            ends = sorted(pair for both in ends for pair in copies_joined(both, instances.copies))
        boundaries = tuple((p, c, self.boundary(stages[p], stages[c])) for p, c in ends)
        return Parts(stages, boundaries, ties, self.hosts, self.cluster.messages_in_order)

    def stage(self, stage: Stage, use: StageUse) -> StageWork:
        layers, how = stage.layers, (stage.by_block, stage.sharding)
        key = (layers.start, layers.stop, stage.devices, stage.slices, use, how)
        return self.stages.find(
            key,
            lambda: stage_work(
                next(self.numbers),
                stage,
                use,
                self.sums.by_block if stage.by_block else self.sums,
                self.cluster,
                optimizer_bytes_per_parameter_byte=self.optimizer_bytes_per_parameter_byte,
            ),
        )

    def boundary(self, producer: StageWork, consumer: StageWork) -> Boundary:
        """The messages between two stages."""
        return self.boundaries.find(
            (producer.number, consumer.number),
            lambda: boundary_between(producer, consumer, self.sums, self.cluster),
        )

    def ties_of(
        self, stages: Sequence[StageWork], stage_of_layer: Sequence[int], instances: Instances
    ) -> tuple[TiedGroup, ...]:
        """Parameters held by several instances, sorted by these: tied ones, and whole stages.

        Instances that share one device sum their gradients without a message.
        """
        held = tied_parameters(stage_of_layer, self.shared)
        if instances.in_turn:
            copies = instances.copies
            held = {
                tuple(sorted(one for user in users for one in copies[user])): held[users]
                for users in held
            }
            for stage, own in enumerate(copies):
                if len(own) > 1 and (own_bytes := bytes_of_own(stages[stage].layers, self.sums)):
                    held[own] = [own_bytes]
        found = (self.tie(users, sizes, stages) for users, sizes in sorted(held.items()))
        return tuple(tie for tie in found if tie.shares)

    def tie(
        self, users: tuple[int, ...], sizes: Sequence[int], stages: Sequence[StageWork]
    ) -> TiedGroup:
        """The reduction of parameters over all replicas of all instances that hold them."""

        def make() -> TiedGroup:
            devices = list(dict.fromkeys(d for user in users for d in stages[user].devices))
            costs = all_reduce_costs(self.cluster, devices)
            shares = tuple(share_of(costs, -1, size) for size in sizes) if costs else ()
            return TiedGroup(users, shares, group_ports(self.cluster, devices))

        key = (users, tuple(stages[user].number for user in users), tuple(sizes))
        return self.ties.find(key, make)


def copies_joined(ends: tuple[int, int], copies: Sequence[tuple[int, ...]]) -> set[tuple[int, int]]:
    """The instances of two stages that work on the same micro-batches."""
    sends, receives = (copies[stage] for stage in ends)
    period = lcm(len(sends), len(receives))
    return {(sends[m % len(sends)], receives[m % len(receives)]) for m in range(period)}


def weight_of_stage(work: StageWork) -> int:
    """Numbers that a stage keeps: those of each replica, and its segments."""
    return len(work.devices) * (17 + len(work.segment_layers)) + 20


def weight_of_boundary(boundary: Boundary) -> int:
    """Pairs of a boundary, plus what an empty one takes."""
    return len(boundary.pairs) + 3


def workload_of(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    schedule: Schedule,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    iterations: int = 1,
) -> Workload:
    """The workload of iterations of ``plan``; ``schedule`` must be valid for ``plan.shape()``."""
    if schedule.concurrent and cluster.messages_in_order:
        raise BadInput(
            f"schedule '{plan.schedule}' runs forwards beside backwards, and messages of cluster "
            f"'{cluster.name}' go in order, which such a schedule does not have; take another one, "
            f'or write messages = "as ready"'
        )
    schedule = dealt(schedule, plan)
    instances = instances_of(schedule, plan)
    catalogue = Catalogue(profile, cluster, optimizer_bytes_per_parameter_byte)
    parts = catalogue.parts_of(plan, instances)
    return Workload(schedule, parts, instances, plan.micro_batches, iterations)


Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class Recent(Generic[Key, Answer]):
    """Keeps the answers used last, up to twice ``capacity`` in total weight.

    There are two generations. A new answer goes to the young one. When that is full, it becomes the
    old one, and the previous old one is dropped. So a hit costs one dictionary look-up, unlike an
    exact LRU cache.
    """

    def __init__(self, capacity: int, weight: Callable[[Answer], int]) -> None:
        self.capacity = capacity
        self.weight = weight
        self.young: dict[Key, Answer] = {}
        self.old: dict[Key, Answer] = {}
        self.young_weight = 0

    def find(self, key: Key, make: Callable[[], Answer]) -> Answer:
        """The answer for ``key``; ``make`` creates it if it is not cached."""
        found = self.young.get(key)
        if found is None:
            found = self.old.get(key)
            if found is None:
                found = make()
            self.keep(key, found)
        return found

    def keep(self, key: Key, answer: Answer) -> None:
        """Cache an answer; when the young generation is full, drop the old one."""
        weight = self.weight(answer)
        if self.young_weight + weight > self.capacity:
            self.old, self.young, self.young_weight = self.young, {}, 0
        self.young[key] = answer
        self.young_weight += weight
