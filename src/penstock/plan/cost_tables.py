"""The layers of a problem on groups of its devices: the arrays of `penstock.plan.compiled_cost`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.collectives import all_reduce_costs
from penstock.cluster.link_matrices import link_matrices
from penstock.plan.cost import crowding
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import (
    EACH,
    FIXED,
    Floats,
    Integers,
    RunTables,
    run_tables,
    workspace_table,
)
from penstock.profile.model_profile import Affine

__all__ = ["ChainCosts", "Costs", "Network", "whole_chain"]


Devices: TypeAlias = tuple[int, ...]
GroupCosts: TypeAlias = tuple[float, float, list[tuple[float, float]]]


class Costs(NamedTuple):
    """The costs of runs of layers on groups of devices; all arrays are flat.

    The first fields, up to ``norm_channels``, are those of `RunTables`: sums up to each cut, or the
    cost of each run at place ``lo * cuts + hi``. ``workspaces`` has a table of all runs for each
    number of rows.

    Replicas of group ``g`` are of the kinds ``first_kind[g]`` to ``first_kind[g + 1] - 1``. A kind
    has rows, a speed, a memory, and the number of its table in ``workspace``. Each group has
    ``all_reduces`` algorithms for its all-reduce, some of them repeated.
    """

    cuts: int
    forward_fixed: Floats
    forward_each: Floats
    backward_fixed: Floats
    backward_each: Floats
    saved_fixed: Floats
    saved_each: Floats
    inputs_fixed: Floats
    inputs_each: Floats
    parameters: Floats
    held: Floats
    down_fixed: Floats
    down_each: Floats
    up_fixed: Floats
    up_each: Floats
    norms: Floats
    norm_channels: Floats
    workspaces: Floats
    first_kind: Integers
    rows: Floats
    speed: Floats
    memory: Floats
    workspace: Integers
    crowding: Floats
    replicas: Integers
    step_s_per_byte: Floats
    all_reduces: int
    all_reduce_latency_s: Floats
    all_reduce_s_per_byte: Floats


class Network(NamedTuple):
    """Links between devices, and the devices of each group with their rows; all arrays are flat.

    The link from device ``i`` to ``j`` is at place ``i * devices + j``. The devices of group ``g``
    are at places ``start[g]`` to ``start[g + 1] - 1``.
    """

    devices: int
    hosts: int
    host: Integers
    latency_s: Floats
    s_per_byte: Floats
    uses_port: NDArray[np.uint8]
    start: Integers
    device: Integers
    rows: Integers


@dataclass
class ChainCosts:
    """The costs of a problem's layers, with the ``cuts`` where stages may begin or end.

    Costs that do not depend on the micro-batch size are computed once.
    """

    problem: PlanningProblem
    cuts: tuple[int, ...]
    workspaces: dict[int, Floats] = field(default_factory=dict[int, Floats])
    known: dict[Devices, GroupCosts] = field(default_factory=dict[Devices, GroupCosts])

    @cached_property
    def runs(self) -> RunTables:
        """The tables of the profile."""
        return run_tables(self.problem, self.cuts)

    @property
    def layers(self) -> int:
        """How many runs there are between neighbouring cuts."""
        return len(self.cuts) - 1

    def layers_of(self, lo: int, hi: int) -> range:
        """The layers between two cuts."""
        return range(self.cuts[lo], self.cuts[hi])

    @cached_property
    def has_workspace(self) -> bool:
        """Whether any layer needs any."""
        return any(layer.workspace_bytes != Affine() for layer in self.problem.profile.layers)

    @cached_property
    def links(self) -> Network:
        """The links, with no groups."""
        cluster = self.problem.cluster
        links, none = link_matrices(cluster), np.zeros(0, dtype=np.int64)
        with np.errstate(divide="ignore"):
            s_per_byte = 1 / links.bytes_per_s
        return Network(
            devices=len(cluster.devices),
            hosts=len(cluster.hosts),
            host=np.array(cluster.host_index, dtype=np.int64),
            latency_s=links.latency_s.ravel(),
            s_per_byte=s_per_byte.ravel(),
            uses_port=links.uses_port.ravel().astype(np.uint8),
            start=none,
            device=none,
            rows=none,
        )

    def network(self, groups: Sequence[Devices], slices: Sequence[Sequence[int]]) -> Network:
        """The groups with the rows of their devices, for transfers."""
        return self.links._replace(start=starts(groups), device=flat(groups), rows=flat(slices))

    def costs(self, groups: Sequence[Devices], slices: Sequence[Sequence[int]]) -> Costs:
        """The groups with the rows of their devices, for stages."""
        devices = self.problem.cluster.devices
        kinds = [
            sorted(
                {
                    (rows, devices[device].speed, devices[device].memory_bytes)
                    for device, rows in zip(group, own, strict=True)
                }
            )
            for group, own in zip(groups, slices, strict=True)
        ]
        counts = sorted({rows for of_group in kinds for rows, _, _ in of_group})
        counts = counts if self.has_workspace else []
        number = {rows: place for place, rows in enumerate(counts)}
        rows, speeds, memories = np.array([kind for own in kinds for kind in own]).T.copy()
        crowds, steps, all_reduces = zip(*map(self.of_group, groups), strict=True)
        latencies, rates = np.array(all_reduces).transpose(2, 0, 1).copy()
        runs = self.runs
        workspaces = [self.workspace(count).ravel() for count in counts or [0]]
        return Costs(
            cuts=len(self.cuts),
            forward_fixed=runs.forward[FIXED],
            forward_each=runs.forward[EACH],
            backward_fixed=runs.backward[FIXED],
            backward_each=runs.backward[EACH],
            saved_fixed=runs.saved[FIXED],
            saved_each=runs.saved[EACH],
            inputs_fixed=runs.inputs[FIXED].ravel(),
            inputs_each=runs.inputs[EACH].ravel(),
            parameters=runs.parameters.ravel(),
            held=runs.held.ravel(),
            down_fixed=runs.down[FIXED],
            down_each=runs.down[EACH],
            up_fixed=runs.up[FIXED],
            up_each=runs.up[EACH],
            norms=runs.norms[0],
            norm_channels=runs.norms[1],
            workspaces=np.concatenate(workspaces),
            first_kind=starts(kinds),
            rows=rows,
            speed=speeds,
            memory=memories,
            workspace=np.array([number.get(count, 0) for count in rows], dtype=np.int64),
            crowding=np.array(crowds),
            replicas=np.array([len(group) for group in groups], dtype=np.int64),
            step_s_per_byte=np.array(steps),
            all_reduces=latencies.shape[1],
            all_reduce_latency_s=latencies.ravel(),
            all_reduce_s_per_byte=rates.ravel(),
        )

    def workspace(self, rows: int) -> Floats:
        """The largest workspace of each run, for so many rows."""
        if rows not in self.workspaces:
            table = workspace_table(self.problem.profile, rows)
            cuts = np.array(self.cuts)
            self.workspaces[rows] = np.ascontiguousarray(table[np.ix_(cuts, cuts)])
        return self.workspaces[rows]

    def of_group(self, devices: Devices) -> GroupCosts:
        """The costs that do not depend on rows: crowding, step seconds a byte, all-reduce costs."""
        if devices not in self.known:
            cluster = self.problem.cluster
            slowest = min(cluster.devices[device].speed for device in devices)
            crowded = crowding(cluster, devices)
            costs = [(c.latency_s, c.s_per_byte) for c in all_reduce_costs(cluster, devices)]
            most = 3 if cluster.links else 2
            self.known[devices] = (
                crowded,
                self.problem.profile.step_s_per_byte * crowded / slowest,
                [*costs, *(costs[:1] or [(0.0, 0.0)]) * most][:most],
            )
        return self.known[devices]


def whole_chain(problem: PlanningProblem) -> ChainCosts:
    """The costs of a problem's layers where stages may begin and end between any two of them."""
    return ChainCosts(problem, tuple(range(len(problem.profile.layers) + 1)))


def starts(parts: Sequence[Sequence[object]]) -> Integers:
    """Where each part begins when they stand one after the other; and where the last one ends."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def flat(parts: Sequence[Sequence[int]]) -> Integers:
    """All parts one after the other."""
    return np.array([n for part in parts for n in part], dtype=np.int64)
