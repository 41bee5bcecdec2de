"""Joins the layers of long chains, for planners whose time grows with the square of the layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from penstock.core.native import GroupCosts, LinkNetwork
from penstock.costs.run_tables import Integers, layers_in_core
from penstock.costs.stage_costs import rows_by_speed
from penstock.costs.tables import ChainCosts
from penstock.plan.problem import PlanningProblem
from penstock.planners.choice import Candidate
from penstock.profile.model_profile import (
    Edge,
    ModelProfile,
    SharedParameter,
    joined_layer,
)


def likely_cuts(problem: PlanningProblem, most: int) -> tuple[int, ...]:
    """The cuts to try: all of a short chain; of a long one those that the fewest bytes cross.

    A chain with more than ``most`` layers has one cut in each of ``most`` equal parts of the work.
    """
    profile = problem.profile
    layers = len(profile.layers)
    if layers <= most:
        return tuple(range(layers + 1))
    size = max(problem.micro_batch_sizes)
    work = list(accumulate((layer.work_s.at(size) for layer in profile.layers), initial=0.0))
    crossing = layers_in_core(profile).crossing_bytes(size)
    best: dict[int, int] = {}
    for cut in range(1, layers):
        part = min(most - 1, int(work[cut] / max(work[-1], 1e-300) * most))
        known = best.setdefault(part, cut)
        if crossing[cut] < crossing[known]:
            best[part] = cut
    return (0, *sorted(best.values()), layers)


def coarse_problem(problem: PlanningProblem, most: int) -> tuple[PlanningProblem, tuple[int, ...]]:
    """The problem with the layers between `likely_cuts` joined, and those cuts."""
    cuts = likely_cuts(problem, most)
    if len(cuts) == len(problem.profile.layers) + 1:
        return problem, cuts
    stages = min(problem.max_stages, len(cuts) - 1)
    profile = merged_runs(problem.profile, cuts, max(problem.micro_batch_sizes))
    return replace(problem, profile=profile, max_stages=stages), cuts


def merged_runs(profile: ModelProfile, cuts: Sequence[int], most_rows: int) -> ModelProfile:
    """The profile with one layer for each run between cuts, which no tensor group divides."""
    place = [i for i, (lo, hi) in enumerate(pairwise(cuts)) for _ in range(lo, hi)]
    edges: dict[tuple[str, int], Edge] = {}
    for edge in profile.edges:
        producer, consumer = place[edge.producer], place[edge.consumer]
        if producer != consumer:
            name = f"{edge.producer}.{edge.tensor}"  # two layers that are joined may use one name
            moved = replace(edge, tensor=name, producer=producer, consumer=consumer)
            edges.setdefault((name, consumer), moved)
    shared = tuple(
        SharedParameter(tied.name, tied.bytes, tuple(sorted({place[i] for i in tied.layers})))
        for tied in profile.shared
    )
    runs = (profile.layers[lo:hi] for lo, hi in pairwise(cuts))
    return replace(
        profile,
        layers=tuple(joined_layer(run, most_rows) for run in runs),
        edges=tuple(edges.values()),
        shared=shared,
        by_length=(),
        tensor_parallel=None,
    )


def expanded(candidates: Iterator[Candidate], cuts: Sequence[int]) -> Iterator[Candidate]:
    """Candidates of a coarse problem as those of the problem itself."""
    for candidate in candidates:
        stages = tuple(
            replace(stage, layers=range(cuts[stage.layers.start], cuts[stage.layers.stop]))
            for stage in candidate.plan.stages
        )
        yield replace(candidate, plan=replace(candidate.plan, stages=stages))


MOST_BLOCKS = 64
"""Number of devices above which the planners place whole blocks of neighbours."""

ALL_WIDTHS = 16
"""Up to this number of blocks every width of a window is tried, on more blocks a few widths."""


@dataclass(frozen=True)
class DeviceLine:
    """An order of devices in equal blocks, and the widths (in blocks) of the windows to try."""

    order: tuple[int, ...]
    block: int
    widths: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.order) // self.block

    def devices(self, position: int, width: int) -> tuple[int, ...]:
        """The devices of ``width`` blocks from block ``position`` on."""
        return self.order[position * self.block : (position + width) * self.block]


def device_line(
    order: tuple[int, ...], micro_batch_size: int, most_blocks: int = MOST_BLOCKS
) -> DeviceLine:
    """The line of an order of devices, small enough for tables over positions and widths.

    Up to ``most_blocks`` devices every device is a block. Of more devices,
    ``ceil(devices / most_blocks)`` neighbours are a block, but never more than a micro-batch has
    rows. Devices behind the last whole block stay idle, and so do those behind the first
    ``most_blocks`` blocks. With more than `ALL_WIDTHS` blocks the widths are 1 to 8, then 12, 16,
    24, 32, 48, 64, and all blocks. No window is wider than a micro-batch has rows.

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
class LineWindows:
    """The windows of a line for one micro-batch size, and the costs of layers on them.

    ``groups[position, number]`` is the number of the window from block ``position`` on that has
    width ``number``; -1 where it would pass the end of the line. ``slices`` are the rows of each
    window's devices.
    """

    line: DeviceLine
    groups: Integers
    devices: Sequence[tuple[int, ...]]
    slices: Sequence[tuple[int, ...]]
    costs: GroupCosts
    network: LinkNetwork


def windows_of_line(chain: ChainCosts, line: DeviceLine, micro_batch_size: int) -> LineWindows:
    """The windows of a line; rows in proportion to the speeds of the devices."""
    places = [
        (position, number)
        for position in range(line.blocks)
        for number, width in enumerate(line.widths)
        if position + width <= line.blocks
    ]
    groups = np.full((line.blocks, len(line.widths)), -1, dtype=np.int64)
    for group, place in enumerate(places):
        groups[place] = group
    devices = [line.devices(position, line.widths[number]) for position, number in places]
    slices = [rows_by_speed(chain.problem.cluster, own, micro_batch_size) for own in devices]
    return LineWindows(
        line, groups, devices, slices, chain.costs(devices, slices), chain.network(devices, slices)
    )


MOST_SIZES = 8
"""The most micro-batch sizes that are tried."""


def few_sizes_for_tables(problem: PlanningProblem) -> tuple[int, ...]:
    """`few_sizes` for planners that fill large tables: half as many on more than `MOST_BLOCKS`.

    Then those in the middle are taken. Smaller ones make many small messages, and larger ones leave
    few micro-batches to a pipeline.
    """
    if len(problem.cluster.devices) <= MOST_BLOCKS:
        return few_sizes(problem)
    sizes, count = few_sizes(problem, len(problem.micro_batch_sizes)), MOST_SIZES // 2
    first = max(0, len(sizes) - count) // 2
    return sizes[first : first + count]


def few_sizes(problem: PlanningProblem, count: int = MOST_SIZES) -> tuple[int, ...]:
    """At most ``count`` micro-batch sizes, spread evenly over those worth trying.

    Sizes that cut the batch into more than 8 micro-batches a device (at least 64) are left out.
    Fill and drain are a small part of such an iteration (GPipe: negligible from 4 a stage), and
    more micro-batches only make messages smaller.
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
