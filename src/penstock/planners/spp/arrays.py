"""Profiles, lines of devices and their windows as flat arrays, for the compiled planners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.bounds.lower_bound import lower_bound
from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_ways
from penstock.plan.cost import crowding, rows_by_speed
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import Floats, run_tables, workspace_table
from penstock.profile.model_profile import Affine, Edge, ModelProfile

__all__ = [
    "DeviceLine",
    "Integers",
    "ProfileArrays",
    "WindowArrays",
    "device_line",
    "few_cuts",
    "few_sizes",
    "few_sizes_for_tables",
]

Integers: TypeAlias = NDArray[np.int64]

MOST_BLOCKS = 64
"""On more devices the planners place whole blocks of neighbours."""

ALL_WIDTHS = 16
"""Up to so many blocks every width of a window is tried, on more of them a geometric choice."""


MOST_CUTS = 96
"""A longer chain is cut at so many places at most."""

MOST_SIZES = 8
"""So many micro-batch sizes are tried at most."""


@dataclass(frozen=True)
class DeviceLine:
    """An order of devices in equal blocks, and the widths (in blocks) of windows that are tried."""

    order: tuple[int, ...]
    block: int
    widths: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """How many blocks the line has."""
        return len(self.order) // self.block

    def devices(self, position: int, width: int) -> tuple[int, ...]:
        """The devices of ``width`` blocks from block ``position`` on."""
        return self.order[position * self.block : (position + width) * self.block]


def device_line(
    order: tuple[int, ...], micro_batch_size: int, most_blocks: int = MOST_BLOCKS
) -> DeviceLine:
    """``order`` as the planners see it, small enough for tables over positions and widths.

    Up to ``most_blocks`` devices every device is a block. On more, ``ceil(devices / most_blocks)``
    neighbours are one, but never more than a micro-batch has rows; devices behind the last whole
    block stay idle, and so do those behind the first ``most_blocks`` blocks. Widths above
    `ALL_WIDTHS` blocks: 1 to 8, then 12, 16, 24, 32, 48, 64, and all of them. No window is wider
    than a micro-batch has rows.

    >>> device_line(tuple(range(130)), 256).block
    3
    """
    block = min(-(-len(order) // most_blocks), micro_batch_size)
    blocks = min(len(order) // block, most_blocks)
    if blocks <= ALL_WIDTHS:
        widths = set(range(1, blocks + 1))
    else:
        widths = {*range(1, 9), 12, 16, 24, 32, 48, 64, blocks}
    most = min(blocks, micro_batch_size // block)
    return DeviceLine(
        order[: blocks * block], block, tuple(sorted(width for width in widths if width <= most))
    )


@dataclass(frozen=True)
class WindowArrays:
    """One window of devices as the compiled loops read it.

    ``kinds``: rows, speed, memory and number of the workspace table of each different replica;
    ``ways``: latency and seconds per byte of each way to all-reduce; ``slices``: the rows of each.
    """

    slices: Integers
    kinds: Floats
    crowd: float
    ways: Floats
    step_s_per_byte: float


@dataclass
class ProfileArrays:
    """A problem's profile as prefix sums and tables of runs, shared by all micro-batch sizes.

    Runs start and end at ``cuts`` only (see `few_cuts`), and are numbered by them: run ``[i, j]``
    holds layers ``cuts[i]`` to ``cuts[j] - 1``.
    """

    problem: PlanningProblem
    cuts: tuple[int, ...]
    workspace_rows: dict[int, int] = field(default_factory=dict[int, int])
    workspace_tables: list[Floats] = field(default_factory=list[Floats])
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        tables = run_tables(self.problem)
        profile, cuts = self.problem.profile, np.array(self.cuts)
        self.square = np.ix_(cuts, cuts)
        costs = (tables.forward_s, tables.backward_s, tables.saved_bytes)
        terms = [term[0, cuts] for cost in costs for term in (cost.fixed, cost.per_sample)]
        self.prefix = np.ascontiguousarray(np.stack(terms))
        self.held_bytes = tables.held_bytes[self.square]
        self.parameter_bytes = tables.parameter_bytes[self.square]
        inputs = tables.input_bytes
        self.inputs = np.stack([inputs.fixed[self.square], inputs.per_sample[self.square]])
        self.activations = crossing(profile, lambda edge: edge.bytes)[:, cuts]
        self.gradients = crossing(profile, lambda edge: edge.gradient_bytes)[:, cuts]
        self.layers = len(cuts) - 1
        self.recompute_mode = ("auto", "on", "off").index(self.problem.recompute)

    @property
    def workspaces(self) -> Floats:
        """The workspace tables that the windows made so far name."""
        return np.stack(self.workspace_tables)

    @cached_property
    def has_workspace(self) -> bool:
        """Whether any layer needs any."""
        return any(layer.workspace_bytes != Affine() for layer in self.problem.profile.layers)

    def workspace_number(self, rows: int) -> int:
        """Where in `workspaces` the table for ``rows`` rows stands."""
        key = rows if self.has_workspace else 0
        # Micro-batch sizes are partitioned side by side and share the tables.
        with self.lock:
            if key not in self.workspace_rows:
                self.workspace_tables.append(
                    workspace_table(self.problem.profile, rows)[self.square]
                    if self.has_workspace
                    else np.zeros_like(self.held_bytes)
                )
                self.workspace_rows[key] = len(self.workspace_tables) - 1
            return self.workspace_rows[key]

    def window(self, devices: Sequence[int], micro_batch_size: int) -> WindowArrays:
        """A window with rows in proportion to the speeds of its devices."""
        cluster = self.problem.cluster
        slices = rows_by_speed(cluster, devices, micro_batch_size)
        replicas = [cluster.devices[device] for device in devices]
        kinds = {
            (rows, device.speed, device.memory_bytes)
            for rows, device in zip(slices, replicas, strict=True)
        }
        ways = [(way.latency_s, way.s_per_byte) for way in all_reduce_ways(cluster, devices)]
        return WindowArrays(
            slices=np.array(slices, dtype=np.int64),
            kinds=np.array(
                [(*kind, float(self.workspace_number(kind[0]))) for kind in sorted(kinds)]
            ),
            crowd=crowding_of(cluster, devices),
            ways=np.array(ways, dtype=np.float64).reshape(-1, 2),
            step_s_per_byte=self.problem.profile.step_s_per_byte
            / min(device.speed for device in replicas),
        )


def few_cuts(profile: ModelProfile, most: int = MOST_CUTS) -> tuple[int, ...]:
    """Where stages may begin or end: everywhere, or at ``most`` - 1 cuts of a long chain.

    Of a long chain each of ``most`` - 1 equal shares of its work gives the cut that the fewest
    bytes cross, so that a branched graph is cut between its branches rather than through them.
    """
    layers = len(profile.layers)
    if layers <= most:
        return tuple(range(layers + 1))
    forward, backward = profile.prefix_sums(profile.batch_size)
    work = np.array(forward) + np.array(backward)
    share = np.minimum((work * (most - 1) / max(work[-1], 1e-300)).astype(int), most - 2)
    crossed = crossing(profile, lambda edge: edge.bytes + edge.gradient_bytes)
    size = crossed[0] + profile.batch_size * crossed[1]
    inner = sorted(range(1, layers), key=lambda cut: (share[cut], size[cut], cut))
    chosen = {share[cut]: cut for cut in reversed(inner)}
    return (0, *sorted(set(chosen.values())), layers)


def few_sizes_for_tables(problem: PlanningProblem) -> tuple[int, ...]:
    """`few_sizes` of planners that fill large tables: half as many on more than `MOST_BLOCKS`.

    Then those nearest to the size with which the bound is least, where it says one: of the divisors
    of a large batch most are far too small or do not fit.
    """
    if len(problem.cluster.devices) <= MOST_BLOCKS:
        return few_sizes(problem)
    sizes = few_sizes(problem, len(problem.micro_batch_sizes))
    if len(sizes) <= MOST_SIZES // 2:
        return sizes
    best = lower_bound(problem).micro_batch_size
    if not best:
        return few_sizes(problem, MOST_SIZES // 2)
    nearest = sorted(sizes, key=lambda size: (abs(log(size / best)), size))
    return tuple(sorted(nearest[: MOST_SIZES // 2]))


def few_sizes(problem: PlanningProblem, count: int = MOST_SIZES) -> tuple[int, ...]:
    """At most ``count`` micro-batch sizes, spread evenly over those worth trying.

    Left out are sizes that cut the batch into more than 8 micro-batches a device (at least 64):
    by then the fill and drain of a pipeline are a small part of its iteration (GPipe: negligible
    from 4 a stage), and messages only get smaller.
    """
    most = max(64, 8 * len(problem.cluster.devices))
    sizes = sorted(
        {size for size in problem.micro_batch_sizes if problem.global_batch // size <= most}
    )
    sizes = sizes or [max(problem.micro_batch_sizes)]
    if len(sizes) <= count:
        return tuple(sizes)
    places = [round(i * (len(sizes) - 1) / (count - 1)) for i in range(count)]
    return tuple(sizes[place] for place in places)


def crowding_of(cluster: Cluster, devices: Sequence[int]) -> float:
    """`crowding`, without looking at every host where none has too few cores."""
    if not any(host.full_speed_devices for host in cluster.hosts):
        return 1.0
    return crowding(cluster, devices)


def crossing(profile: ModelProfile, of: Callable[[Edge], Affine]) -> Floats:
    """Bytes of all tensors that cross each cut: row 0 fixed, row 1 per sample."""
    steps = np.zeros((2, len(profile.layers) + 2))
    ends: dict[str, tuple[Edge, int]] = {}
    for edge in profile.edges:
        first, last = ends.get(edge.tensor, (edge, edge.consumer))
        ends[edge.tensor] = (first, max(last, edge.consumer))
    for edge, last in ends.values():
        size = np.array([of(edge).fixed, of(edge).per_sample])
        steps[:, edge.producer + 1] += size
        steps[:, last + 1] -= size
    # Sums and differences of figures leave a rounding error where nothing crosses.
    open_tensors = np.zeros(len(profile.layers) + 2)
    for edge, last in ends.values():
        open_tensors[edge.producer + 1] += 1
        open_tensors[last + 1] -= 1
    crossed = np.where(np.cumsum(open_tensors) > 0, np.cumsum(steps, axis=1), 0.0)
    return np.ascontiguousarray(np.maximum(crossed, 0.0)[:, :-1])
