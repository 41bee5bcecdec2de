"""Parts of a record that are stages': their calls, what they receive and send, and their leaves."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from penstock.capture.contract import TensorSpec
from penstock.capture.cut.cut import Cut, LayerCrossing
from penstock.capture.cut.needs import Needs
from penstock.capture.forward.partial_forward import ProgramPart
from penstock.capture.record.calls import ProgramRecord
from penstock.capture.record.example import Recorded
from penstock.errors import BadInput


def program_part(
    recorded: Recorded,
    cut: Cut,
    crossings: Sequence[LayerCrossing],
    needs: Needs,
    layers: range,
) -> ProgramPart:
    """The part of a record that is a stage's of these layers, between which values cross.

    Raises `BadInput` if state that changes with every call is of units of several stages.
    """
    record = recorded.record
    first, last = cut.bounds[layers.start], cut.bounds[layers.stop]
    own = record.events[first:last]
    units = frozenset(event.address for event in own if event.is_unit)
    check_state(recorded, units)
    held = {name for event in own for name in event.params}
    held |= {use.name for use in cut.parameter_uses if set(use.layers) & set(layers)}
    received: dict[int, Any] = {}
    sent: dict[int, Any] = {}
    for crossing in crossings:
        value = record.values[crossing.value]
        address = record.events[value.maker].address, value.slot
        if crossing.maker < layers.start and any(r in layers for r in crossing.readers):
            received[crossing.value] = address
        if crossing.maker in layers and crossing.readers[-1] >= layers.stop:
            sent[crossing.value] = address
    answers = {record.events[n].address: record.events[n].answer for n in needs.as_on_example}
    # Forward that changes its own state must run to its end, or its last lines never count here,
    # and what it changes for a while only is never taken back. The same holds where it registers a
    # hook on a tensor, or calls a unit that keeps state, after what is sent.
    made = max((record.values[value].maker for value in sent), default=last)
    changing = {unit for unit, _ in recorded.unit_changes}
    late = any(event.address[0] in changing for event in record.events[made + 1 : last])
    hooked = any(first <= record.values[v].maker < last for v in record.hooks.on_tensors.values())
    to_end = bool(recorded.changes_again) or record.is_temporary or hooked or late
    return ProgramPart(first, last, units, frozenset(held), received, sent, answers, to_end)


def check_state(recorded: Recorded, units: Collection[Any]) -> None:
    """Raise `BadInput` if of a unit whose state changes with every call only some are a stage's."""
    for unit, place in recorded.unit_changes:
        calls = [e for e in recorded.record.events if e.is_unit and e.address[0] == unit]
        own = [event for event in calls if event.address in units]
        if own and len(own) < len(calls):
            raise BadInput(
                f"'{place.name}' changes with every call, and '{unit}' is called in several "
                f"stages, which would each count for themselves; cut the model so that all calls "
                f"are in one stage"
            )


def leaves_of_part(
    recorded: Recorded, needs: Needs, part: ProgramPart, outputs: Sequence[int], *, with_loss: bool
) -> frozenset[int]:
    """The leaves whose values a stage reads: for its calls, and the batch's part of these.

    ``outputs`` are values that the last stage returns; ``with_loss`` it also weighs the loss.
    """
    record, end = recorded.record, part.last
    if outputs or with_loss or part.to_end or not part.sent:
        end = len(record.events)
    wanted = {
        number
        for number, event in enumerate(record.events[:end])
        if event.reads_values and not event.depends
    }
    # The lengths by which sequences are packed: by them all stages know the sizes.
    packing = (e for e in record.events[:end] if e.address[1] == "_pack_padded_sequence")
    wanted |= {record.values[value].maker for event in packing for value in event.reads[1:2]}
    wanted |= set(range(part.first, part.last))
    if with_loss:
        wanted |= {n for n, own in recorded.parts.actions.items() if own}
    makers = {record.values[value].maker for value in outputs}
    returned = frozenset(leaf for maker in makers for leaf in record.events[maker].leaves)
    return leaves_read_by(record, {*(wanted & needs.events), *makers}) | returned


def leaves_read_by(record: ProgramRecord, events: Iterable[int]) -> frozenset[int]:
    """The leaves of the batch from which calls, and what they read of the batch, are made."""
    todo, done, found = list(events), set[int](), set[int]()
    while todo:
        number = todo.pop()
        if number in done:
            continue
        done.add(number)
        event = record.events[number]
        if event.address[0] == "":
            continue  # the batch's own leaf: read by those that read its value
        found |= event.leaves
        for value in event.reads:
            if value not in record.dependent:
                todo.append(record.values[value].maker)
    return frozenset(found)


def leaves_of_sizes(
    inputs: Collection[int],
    received: Sequence[TensorSpec],
    readable: Collection[int],
    length_places: Sequence[Sequence[tuple[int, int]]],
) -> list[int]:
    """The ``readable`` leaves of which only the size is read, beside the inputs of a stage.

    A stage needs the number of samples, and lengths, from some tensor.
    """
    found: list[int] = []
    if not inputs and not any(spec.has_plain_rows for spec in received):
        found.append(min(readable, default=0))
    for places in length_places:
        own = [leaf for leaf, _ in places if leaf in readable]
        if own and not any(leaf in (*inputs, *found) for leaf, _ in places):
            found.append(own[0])
    return found
