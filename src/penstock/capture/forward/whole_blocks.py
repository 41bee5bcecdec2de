"""Blocks that a stage runs, or leaves out, as a whole.

part of the stage               unit | unit + unit +  unit | + unit
blocks            block 2 ....... block 3 .......  block 4 .......
                  left out        all of it is     runs unit by unit
                                  this stage's
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from penstock.capture.record.calls import BlockCall, ProgramRecord


def whole_blocks(
    record: ProgramRecord, may_be: Callable[[BlockCall], bool]
) -> dict[str, list[BlockCall]]:
    """The blocks of which each call ``may_be`` whole, and no unit is called elsewhere, by path."""
    by_path: dict[str, list[BlockCall]] = defaultdict(list)
    for block in record.blocks:
        by_path[block.path].append(block)
    return {
        path: blocks
        for path, blocks in by_path.items()
        if all(map(may_be, blocks))
        and all(record.counts[unit] == own for unit, own in units_in(record, blocks).items())
    }


def numbers_in(blocks: Iterable[BlockCall]) -> set[int]:
    """The events within these calls of blocks."""
    return {number for block in blocks for number in range(block.first, block.last)}


def units_in(record: ProgramRecord, blocks: Iterable[BlockCall]) -> Counter[str]:
    """Count the calls of units within these calls of blocks."""
    events = (record.events[number] for number in numbers_in(blocks))
    return Counter(event.address[0] for event in events if event.is_unit)
