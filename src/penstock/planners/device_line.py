"""A line of devices, of which each stage takes a window of neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.plan.cost import rows_by_speed
from penstock.plan.cost_tables import ChainCosts, Costs, Network
from penstock.plan.run_tables import Integers

__all__ = ["DeviceLine", "LineWindows", "device_line", "windows_of"]

MOST_BLOCKS = 64
"""On more devices the planners place whole blocks of neighbours."""

ALL_WIDTHS = 16
"""Up to so many blocks every width of a window is tried, on more blocks a few widths."""


@dataclass(frozen=True)
class DeviceLine:
    """An order of devices in equal blocks, and the widths (in blocks) of the windows to try."""

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
    costs: Costs
    network: Network


def windows_of(chain: ChainCosts, line: DeviceLine, micro_batch_size: int) -> LineWindows:
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
