"""Few cuts, devices and sizes, for planners whose time grows with the square of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from penstock.core.native import GroupCosts, LinkNetwork
from penstock.costs.run_tables import Integers, layers_in_core
from penstock.costs.stage_costs import rows_by_speed
from penstock.costs.tables import ChainCosts
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem


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
    """The windows of a line for one micro-batch size, and the costs of a chain's layers on them.

    ``groups[position, number]`` is the number of the window from block ``position`` on that has
    width ``number``; -1 where it would pass the end of the line. ``slices`` are the rows of each
    window's devices.
    """

    chain: ChainCosts
    line: DeviceLine
    micro_batch_size: int
    groups: Integers
    devices: Sequence[tuple[int, ...]]
    slices: Sequence[tuple[int, ...]]
    costs: GroupCosts
    network: LinkNetwork

    @property
    def micro_batches(self) -> int:
        return self.chain.problem.global_batch // self.micro_batch_size

    def stage(
        self, lo: int, hi: int, position: int, number: int, *, recompute: bool = False
    ) -> Stage:
        """The layers between two cuts as a stage on a window."""
        group = int(self.groups[position, number])
        layers = self.chain.layers_of(lo, hi)
        return Stage(layers, self.devices[group], self.slices[group], recompute)


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
    costs, network = chain.costs(devices, slices), chain.network(devices, slices)
    return LineWindows(chain, line, micro_batch_size, groups, devices, slices, costs, network)


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
