"""A run of a stage in which every call is compared with the record.

The run is recorded in its turn. Calls that depend on parameters must be those of the record, in the
same order; what a batch alone decides (whether a mask is needed) may differ from batch to batch.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.capture.record.example import leaves_as_values
from penstock.capture.record.recording import Address, ProgramRecording, RecordedCall, line_in_words
from penstock.capture.stage.stage import PathChanged, ProgramStage

if TYPE_CHECKING:
    from penstock.capture.layer_graph import LayerGraph

__all__ = ["checked"]


def checked(
    graph: "LayerGraph",
    stage: ProgramStage,
    call: Callable[[], Any],
    leaves: Mapping[int, torch.Tensor],
) -> Callable[[], Any]:
    """``call``, a run of the user's program in ``stage``, which also compares its calls.

    Raises:
        PathChanged: a call differs from the record.
    """
    record = graph.recorded.record

    def run() -> Any:
        again = ProgramRecording(graph.program, record.units, (), stage.stand_ins, None)
        given = [leaves[index] for index in sorted(leaves)]
        leaves_as_values(again, given)
        arrived = RecordedCall(("", "received"), params=["received"])
        again.events.append(arrived)
        for slot, tensor in enumerate(stage.received.values()):
            again.make(arrived, len(given), slot, tensor)
        try:
            with again.active():
                return call()
        finally:
            compare(record, again)

    return run


def compare(record: ProgramRecording, again: ProgramRecording) -> None:
    """Raise `PathChanged` if the calls of the record are not made in order, up to a stage's end.

    More calls of functions may be made, by hooks that the user has registered since.
    """
    wanted, place = dependent_calls(record), 0
    for event in dependent_calls(again):
        expected = wanted[place].address if place < len(wanted) else None
        if event.address == expected:
            place += 1
        elif event.is_unit:
            there = in_words(expected) if expected is not None else "nothing more"
            raise PathChanged(
                f"{in_words(event.address)} is called where the example called {there}"
            )


def dependent_calls(record: ProgramRecording) -> list[RecordedCall]:
    """The calls that depend on parameters."""
    return [
        event
        for number, event in enumerate(record.events)
        if event.depends
        and event.address[0] != ""
        and not event.asks
        and number not in record.hook_events
    ]


def in_words(address: Address) -> str:
    """A call for messages."""
    if len(address) == 2:
        return f"'{address[0]}'"
    return f"'{address[1]}' at {line_in_words(address[2])}"
