"""Blocks that a stage runs, or leaves out, as a whole.

part of the stage               unit | unit + unit +  unit | + unit
blocks            block 2 ....... block 3 .......  block 4 .......
                  left out        all of it is     runs unit by unit
                                  this stage's
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from penstock.capture.forward.partial_forward import StageTask
from penstock.capture.forward.watched import Watched
from penstock.capture.record.calls import BlockCall, ProgramRecord
from penstock.torch_internals import BACKWARD_HOOKS, COMPILED_CALL

Blocks: TypeAlias = dict[str, list[BlockCall]]
"""Calls of blocks by path."""


def blocks_as_wholes(task: StageTask, watched: Watched) -> tuple[Blocks, Blocks]:
    """The blocks that a stage leaves out, and those that are its own and run as if they were units.

    None of them is looked into; so there is none for a stage that checks.
    """
    if task.purpose == "checking":
        return {}, {}
    left_out = whole_blocks(task.record, partial(can_be_left_out, task, watched))
    own = partial(can_run_whole, task, watched)
    return left_out, {} if task.probes else whole_blocks(task.record, own)


def can_be_left_out(task: StageTask, watched: Watched, block: BlockCall) -> bool:
    """Return whether nothing within a call of a block is of the stage."""
    part, record = task.part, task.record
    overlaps = block.last > part.first and block.first < part.last
    if not block.closed or (overlaps and not task.probes):
        return False
    inside = {record.events[number].address for number in events_in([block])}
    if inside & task.actions_of.keys() or not hides_only(task, watched, block, part.received):
        return False
    return not any(
        place.path == block.path or place.path.startswith(f"{block.path}.")
        for place in task.recorded.changes
    )


def can_run_whole(task: StageTask, watched: Watched, block: BlockCall) -> bool:
    """Return whether all within a call of a block is of the stage, and only its result is sent."""
    part, record = task.part, task.record
    module: dict[str, Any] = task.program.module(block.path).__dict__
    if any(module.get(key) for key in (*BACKWARD_HOOKS, COMPILED_CALL)):
        return False  # what is sent is taken inside of the module's call
    if block.first < part.first or block.last > part.last:
        return False
    events = [record.events[number] for number in events_in([block])]
    if task.draws_in_all and any(event.random for event in events):
        return False
    units = [event.address for event in events if event.is_unit]
    if not part.units.issuperset(units) or any(task.by_sample(path) for path, _ in units):
        return False
    seen = {event.address for event in events} & watched.addresses
    results = {address for address, _ in part.sent.values()}
    return seen <= results and hides_only(task, watched, block, part.sent)


def hides_only(
    task: StageTask, watched: Watched, block: BlockCall, crossing: Mapping[int, Any]
) -> bool:
    """Return whether only the block's result crosses, and no later place is renumbered."""
    record, inside = task.record, events_in([block])
    results = {made.what for made in block.result[0] if made.kind == "made"}
    if any(record.values[v].maker in inside and v not in results for v in crossing):
        return False
    # A call of the same line after the block has the next number there.
    addresses = {record.events[number].address for number in inside}
    places = {address[:3] for address in addresses}
    return all(address[:3] not in places for address in watched.addresses - addresses)


def whole_blocks(record: ProgramRecord, may_be: Callable[[BlockCall], bool]) -> Blocks:
    """The blocks of which each call ``may_be`` whole, and no unit is called elsewhere, by path."""
    by_path: Blocks = defaultdict(list)
    for block in record.blocks:
        by_path[block.path].append(block)
    return {
        path: blocks
        for path, blocks in by_path.items()
        if all(map(may_be, blocks))
        and all(record.counts[unit] == own for unit, own in units_in(record, blocks).items())
    }


def events_in(blocks: Iterable[BlockCall]) -> set[int]:
    """The events within these calls of blocks."""
    return {number for block in blocks for number in range(block.first, block.last)}


def units_in(record: ProgramRecord, blocks: Iterable[BlockCall]) -> Counter[str]:
    """Count the calls of units within these calls of blocks."""
    events = (record.events[number] for number in events_in(blocks))
    return Counter(event.address[0] for event in events if event.is_unit)
