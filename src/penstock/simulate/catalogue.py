"""Caches the parts that plans consist of: the work of each stage and the messages of each pair."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import chain, pairwise, repeat
from math import lcm
from typing import Generic, TypeVar

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_costs
from penstock.core.native import Boundary, PartCosts, StageWork, TiedGroup
from penstock.costs.run_tables import layers_in_core
from penstock.costs.tables import hardware_in_core
from penstock.errors import BadInput
from penstock.plan.plan import SHARDINGS, Plan, Stage
from penstock.profile.model_profile import ModelProfile, SharedParameter
from penstock.schedule.schedule import Schedule
from penstock.simulate.instances import (
    Instances,
    StageUse,
    dealt,
    instances_of,
    stages_of_instances,
)
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
        self.profile, self.cluster = profile, cluster
        self.hardware = hardware_in_core(cluster)
        self.state = optimizer_bytes_per_parameter_byte
        self.skips = any(edge.consumer - edge.producer > 1 for edge in profile.edges)
        # A stage keeps the numbers of each replica, and its segments; a boundary keeps pairs.
        self.stages = Recent[object, StageWork](
            MOST_SECONDS, lambda work: work.size * (17 + len(work.segment_layers)) + 20
        )
        self.boundaries = Recent[object, Boundary](MOST_PAIRS, lambda own: len(own.pairs) + 3)
        self.ties = Recent[object, TiedGroup](MOST_PAIRS, lambda tie: len(tie.shares))

    @cached_property
    def costs(self) -> PartCosts:
        return PartCosts(layers_in_core(self.profile), self.hardware, self.state)

    @cached_property
    def by_block(self) -> PartCosts:
        """The costs of stages that recompute by block."""
        return PartCosts(layers_in_core(self.profile.by_block), self.hardware, self.state)

    def parts_of(self, plan: Plan, instances: Instances) -> Parts:
        """The parts of ``plan``, used as ``instances`` say.

        Messages pass between neighbours and, for each skip connection, between its ends.
        """
        earlier = chain(earlier_of_home(plan) if self.skips else (), repeat(()))
        stages = tuple(map(self.stage, stages_of_instances(plan), instances.uses, earlier))
        ends: list[tuple[int, int]] = list(pairwise(range(len(plan.stages))))
        ties: tuple[TiedGroup, ...] = ()
        if self.skips or self.profile.shared or instances.in_turn:
            cuts = [0, *(stage.layers.stop for stage in plan.stages)]
            ends = self.costs.connected(cuts, plan.homes)
            ties = self.ties_of(stages, cuts, instances)
        if instances.in_turn:
            ends = sorted(pair for both in ends for pair in copies_joined(both, instances.copies))
        boundaries = tuple((p, c, self.boundary(stages[p], stages[c])) for p, c in ends)
        in_order = self.cluster.messages_in_order
        return Parts(stages, boundaries, ties, self.hardware.hosts, in_order)

    def stage(
        self, stage: Stage, use: StageUse, earlier: tuple[tuple[int, int], ...] = ()
    ) -> StageWork:
        """The work of an instance of a stage; its devices are ``stage.devices``.

        ``earlier`` are the layers of the stages before it at its home.
        """
        run, sharding = (stage.layers.start, stage.layers.stop), SHARDINGS.index(stage.sharding)
        ways = (run, earlier, stage.devices, stage.slices, sharding, use)
        costs = self.by_block if stage.by_block else self.costs
        return self.stages.find(
            (ways, stage.by_block),
            lambda: costs.stage(*ways, all_reduce_costs(self.cluster, stage.devices)),
        )

    def boundary(self, producer: StageWork, consumer: StageWork) -> Boundary:
        """The messages between two stages."""
        return self.boundaries.find(
            (producer, consumer), lambda: self.costs.boundary(producer, consumer)
        )

    def ties_of(
        self, stages: Sequence[StageWork], cuts: Sequence[int], instances: Instances
    ) -> tuple[TiedGroup, ...]:
        """Parameters held by several instances, sorted by these: tied ones, and whole stages.

        Instances that share one device sum their gradients without a message.
        """
        held = tied_parameters(cuts, self.profile.shared)
        if instances.in_turn:
            copies = instances.copies
            held = {
                tuple(sorted(one for user in users for one in copies[user])): held[users]
                for users in held
            }
            for stage, own in enumerate(copies):
                if len(own) > 1 and (own_bytes := self.costs.whole_bytes(stages[stage])):
                    held[own] = [own_bytes]
        found = (self.tie(users, sizes, stages) for users, sizes in sorted(held.items()))
        return tuple(tie for tie in found if tie.shares)

    def tie(
        self, users: tuple[int, ...], sizes: Sequence[float], stages: Sequence[StageWork]
    ) -> TiedGroup:
        """The reduction of parameters over all replicas of all instances that hold them."""

        def make() -> TiedGroup:
            devices = list(dict.fromkeys(d for user in users for d in stages[user].devices))
            return self.costs.tie(users, sizes, devices, all_reduce_costs(self.cluster, devices))

        key = (users, tuple(stages[user] for user in users), tuple(sizes))
        return self.ties.find(key, make)


def earlier_of_home(plan: Plan) -> list[tuple[tuple[int, int], ...]]:
    """The layers of the stages before each stage at its home, which receive for it."""
    before: dict[int, tuple[tuple[int, int], ...]] = {}
    found: list[tuple[tuple[int, int], ...]] = []
    for stage, home in zip(plan.stages, plan.homes, strict=True):
        found.append(before.get(home, ()))
        before[home] = (*found[-1], (stage.layers.start, stage.layers.stop))
    return found


def tied_parameters(
    cuts: Sequence[int], shared: Sequence[SharedParameter]
) -> dict[tuple[int, ...], list[float]]:
    """Bytes of the parameters that several stages share, by these stages."""
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for parameter in shared:
        stages = tuple(sorted({bisect_right(cuts, layer) - 1 for layer in parameter.layers}))
        if len(stages) > 1 and parameter.bytes:
            found[stages].append(parameter.bytes)
    return found


def copies_joined(ends: tuple[int, int], copies: Sequence[tuple[int, ...]]) -> set[tuple[int, int]]:
    """The instances of two stages that work on the same micro-batches."""
    sends, receives = (copies[stage] for stage in ends)
    period = lcm(len(sends), len(receives))
    return {(sends[m % len(sends)], receives[m % len(receives)]) for m in range(period)}


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
