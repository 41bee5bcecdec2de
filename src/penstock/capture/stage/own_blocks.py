"""Blocks of which every call is one stage's, so that the stage may run them as a whole.

part of the stage    unit | unit + unit +  unit | + unit
blocks                   block 3 .......  block 4 .......
own                      block 3: all of it is this stage's, and nothing inside is watched
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from penstock.capture.record.example import Recorded
from penstock.capture.record.recording import Address, BlockCall

__all__ = ["own_blocks"]


def own_blocks(
    recorded: Recorded,
    part: range,
    sent: Mapping[int, tuple[Address, Any]],
    watched: Collection[Address],
    *,
    streams: bool,
) -> dict[str, list[BlockCall]]:
    """The calls of blocks that are all a stage's, by path.

    ``part`` are the stage's events, ``sent`` the values that it sends, each with the address of its
    maker. ``watched`` are addresses of calls between units that the stage must see. ``streams``:
    calls that draw are seen, too.
    """
    record, events = recorded.record, recorded.record.events
    by_path: dict[str, list[BlockCall]] = defaultdict(list)
    for block in record.blocks:
        by_path[block.path].append(block)
    varying = {
        path
        for calls in recorded.calls
        for path in calls
        if len({other.get(path, 0) for other in recorded.calls}) > 1
    }

    def is_own(block: BlockCall) -> bool:
        inside = range(block.first, block.last)
        if block.first < part.start or block.last > part.stop:
            return False
        results = {made.what for made in block.template if made.kind == "made"}
        for number in inside:
            event = events[number]
            own = (value for value in event.makes if record.values[value].maker == number)
            if any(value in sent and value not in results for value in own):
                return False
            if streams and event.random:
                return False
            if event.is_unit and event.address[0] in varying:
                return False
        # A call of the same line after the block has the next number there.
        places = {events[number].address[:3] for number in inside}
        makers = {sent[value][0] for value in results if value in sent}
        return not any(address[:3] in places for address in watched if address not in makers)

    found: dict[str, list[BlockCall]] = {}
    for path, blocks in by_path.items():
        covered = {number for block in blocks for number in range(block.first, block.last)}
        units = {events[number].address[0] for number in covered if events[number].is_unit}
        outside = (e for n, e in enumerate(events) if e.is_unit and n not in covered)
        if all(map(is_own, blocks)) and not any(event.address[0] in units for event in outside):
            found[path] = blocks
    return found
