"""Calls of units, and of blocks that run or are left out whole, in the order of a stage's run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.capture.forward.partial_forward import StageTask
from penstock.capture.forward.watched import Slots, Watched, crossing
from penstock.capture.forward.whole_blocks import units_in
from penstock.capture.record.calls import Address, BlockCall, Made


@dataclass(frozen=True, slots=True)
class UnitCall:
    """Role of a stage in one call of a unit, or of a block that is left out.

    ``first`` is the number of its (first) event.
    """

    own: bool
    anchor: Address | None
    template: Sequence[Made]
    spec: Any
    sent: Slots | None
    watch: bool
    first: int
    draws: bool = False


def unit_calls(
    task: StageTask,
    watched: Watched,
    left_out: Mapping[str, Sequence[BlockCall]],
    own: Mapping[str, Sequence[BlockCall]],
) -> dict[str, list[UnitCall]]:
    """The calls that a run makes or leaves out, by the path of their module."""
    record, part = task.record, task.part
    sent = crossing(part.sent, units=True)

    def of_unit(number: int) -> UnitCall:
        event = record.events[number]
        assert event.result is not None
        anchor = record.anchor_of(event.address)
        return UnitCall(
            event.address in part.units,
            anchor,
            *event.result,
            sent.get(event.address),
            anchor in watched.anchors,
            number,
            event.random,
        )

    def of_block(block: BlockCall, *, own: bool) -> UnitCall:
        tensors = [made for made in block.result[0] if made.kind in ("made", "given")]
        made = {made.what: slot for slot, made in enumerate(tensors) if made.kind == "made"}
        return UnitCall(
            own,
            block.anchor,
            *block.result,
            {slot: value for value, slot in made.items() if value in part.sent} if own else None,
            block.anchor in watched.anchors,
            block.first,
        )

    calls: dict[str, list[UnitCall]] = defaultdict(list)
    for number, event in enumerate(record.events):
        if event.is_unit:
            calls[event.address[0]].append(of_unit(number))
    for path, blocks in {**left_out, **own}.items():
        for unit in units_in(record, blocks):
            del calls[unit]
        calls[path] = [of_block(block, own=path in own) for block in blocks]
    return dict(calls)
