"""The layers of a problem on groups of its devices, for the core's programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_costs
from penstock.cluster.link_matrices import link_matrices
from penstock.core.native import (
    AllReduceCost,
    GroupCosts,
    Hardware,
    HostRules,
    LinkNetwork,
    Links,
    Machine,
    RunCosts,
    SearchCosts,
)
from penstock.costs.run_tables import Floats, layers_in_core, run_tables, workspace_table
from penstock.plan.plan import SHARDINGS
from penstock.plan.problem import PlanningProblem, in_blocks, recalled, remembered
from penstock.profile.model_profile import Affine

Devices: TypeAlias = tuple[int, ...]


RECOMPUTE_MODES = {"auto": 0, "on": 1, "off": 2}
"""Numbers of recompute modes in the core: where memory requires it, all stages, none."""

NO_TIME = AllReduceCost(0.0, 0.0)
"""The cost of summing on one device."""

FULL, RECOMPUTES = -1, 1
"""A stage on its devices does not fit, or recomputes; 0: it keeps its activations."""


def crowding(cluster: Cluster, devices: Sequence[int]) -> float:
    """By how much ``devices`` slow one another down when all compute at once, 1 for not at all."""
    factor = 1.0
    for index, full_speed_devices in cluster.slowing_hosts.items():
        busy = sum(cluster.host_index[device] == index for device in devices)
        factor = max(factor, busy / full_speed_devices)
    return factor


@dataclass
class ChainCosts:
    """The costs of a problem's layers, with the ``cuts`` where stages may begin or end.

    Costs that do not depend on the micro-batch size are computed once.
    """

    problem: PlanningProblem
    cuts: tuple[int, ...]
    workspaces: dict[int, Floats] = field(default_factory=dict[int, Floats])

    @cached_property
    def runs(self) -> RunCosts:
        return run_tables(self.problem, self.cuts)

    @cached_property
    def by_block(self) -> "ChainCosts":
        """The same where all stages recompute by block."""
        # Costs do not depend on schedules, and what would fit is queried for others than these.
        freer = replace(self.problem, schedules=PlanningProblem.schedules)
        return ChainCosts(in_blocks(freer), self.cuts)

    @property
    def layers(self) -> int:
        """The number of runs between neighbouring cuts."""
        return len(self.cuts) - 1

    def layers_of(self, lo: int, hi: int) -> range:
        """The layers between two cuts."""
        return range(self.cuts[lo], self.cuts[hi])

    @cached_property
    def has_workspace(self) -> bool:
        """True if any layer needs workspace."""
        return any(layer.workspace_bytes != Affine() for layer in self.problem.profile.layers)

    @cached_property
    def hardware(self) -> Hardware:
        return hardware_in_core(self.problem.cluster)

    def network(self, groups: Sequence[Devices], slices: Sequence[Sequence[int]]) -> LinkNetwork:
        """The groups with the rows of their devices, for transfers."""
        return LinkNetwork(self.hardware, members_of(groups, slices))

    def costs(self, groups: Sequence[Devices], slices: Sequence[Sequence[int]]) -> GroupCosts:
        """The groups with the rows of their devices, for stages."""
        cluster = self.problem.cluster
        counts = {rows for own in slices for rows in own} if self.has_workspace else {0}
        return GroupCosts(
            self.runs,
            self.hardware,
            self.problem.profile.step_s_per_byte,
            [(rows, self.workspace(rows)) for rows in counts],
            members_of(groups, slices),
            [all_reduce_costs(cluster, group) or (NO_TIME,) for group in groups],
        )

    def workspace(self, rows: int) -> Floats:
        """The largest workspace of each run, for ``rows`` rows."""
        if rows not in self.workspaces:
            table = workspace_table(self.problem.profile, rows)
            cuts = np.array(self.cuts)
            self.workspaces[rows] = np.ascontiguousarray(table[np.ix_(cuts, cuts)])
        return self.workspaces[rows]


def members_of(
    groups: Sequence[Devices], slices: Sequence[Sequence[int]]
) -> list[list[tuple[int, int]]]:
    """Each device with its rows, by group."""
    return [list(zip(*group, strict=True)) for group in zip(groups, slices, strict=True)]


def whole_chain(problem: PlanningProblem) -> ChainCosts:
    """The costs of a problem's layers where stages may begin and end between any two of them."""
    return ChainCosts(problem, tuple(range(len(problem.profile.layers) + 1)))


@remembered
def search_costs(problem: PlanningProblem) -> SearchCosts:
    """Return profile and cluster for the core, with tables of all runs of layers."""
    return SearchCosts(
        run_tables(problem),
        layers_in_core(problem.profile),
        hardware_in_core(problem.cluster),
    )


def hardware_in_core(cluster: Cluster) -> Hardware:
    """Return the devices of a cluster for the core, with the links between all pairs of them."""
    links = link_matrices(cluster)
    return Hardware(
        [
            Machine(
                device.speed,
                device.memory_bytes,
                host,
                device.chip,
                device.overlaps_communication,
                device.concurrent_passes,
                device.message_s,
                device.message_bytes_per_s,
            )
            for device, host in zip(cluster.devices, cluster.host_index, strict=True)
        ],
        [
            HostRules(host.full_speed_devices, host.half_duplex, host.separate_links)
            for host in cluster.hosts
        ],
        Links(
            links.bytes_per_s,
            links.latency_s,
            links.uses_port.astype(np.uint8),
            cluster.sum_step_s,
        ),
    )


def costs_with(problem: PlanningProblem, sharding: int, *, by_block: bool) -> SearchCosts:
    """Return the costs where all stages shard the same, and recompute by block or not."""

    def find() -> SearchCosts:
        profile = problem.profile.by_block if by_block else problem.profile
        what = SHARDINGS[sharding] or "off"
        return search_costs(replace(problem, profile=profile, sharding=what, pins=()))

    return recalled(problem, costs_with, (sharding, by_block), find)
