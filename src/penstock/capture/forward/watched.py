"""Calls between units that a stage must see: where it receives, sends, draws, or weighs a loss."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from penstock.capture.forward.partial_forward import StageTask
from penstock.capture.record.calls import Address

Slots: TypeAlias = Mapping[Any, int]
"""Values by their slots in the result of a call."""


@dataclass(frozen=True)
class Watched:
    """Calls between units that matter, by address; ``special`` are those that do something else.

    The results of ``received`` and ``sent`` cross to other stages. ``answers`` are of activations
    that may be missing. ``random`` draw for activations, which is one stage's: they must not move
    the generator from which all stages draw. ``hooked_elsewhere`` are hooks on what is received:
    they are where it is made, and all gradients arrive there. ``marks`` are numbers of events at
    which the range begins or ends, if that is to be seen, and ``marked`` those between units.
    """

    addresses: frozenset[Address]
    special: frozenset[Address]
    received: Mapping[Address, Slots]
    sent: Mapping[Address, Slots]
    answers: Mapping[Address, Any]
    random: frozenset[Address]
    hooked_elsewhere: frozenset[Address]
    marks: frozenset[int]
    marked: Mapping[Address, int]

    @cached_property
    def names(self) -> frozenset[Any]:
        """The names of the functions."""
        return frozenset(address[1] for address in self.addresses)

    @cached_property
    def anchors(self) -> frozenset[Any]:
        """The calls of units after which one of them comes."""
        return frozenset(address[0] for address in self.addresses)

    def without(self, addresses: Iterable[Address]) -> "Watched":
        """The same, but for calls that are not seen."""
        return replace(self, addresses=self.addresses.difference(addresses))


def find_watched(task: StageTask) -> Watched:
    """The calls that a stage must see before blocks are left out."""
    events, part = task.record.events, task.part
    received, sent = crossing(part.received, units=False), crossing(part.sent, units=False)
    acted = {events[n].address for n in task.actions if task.probes or part.makes(n, events[n])}
    answers = part.answers
    if task.probes or task.costs == "estimated":
        answers = {e.address: e.answer for e in events if e.reads_values and e.depends}
    drawing = (e for e in events if e.random and e.depends and not e.is_unit)
    random = frozenset(event.address for event in drawing) if task.draws_in_all else frozenset()
    hooks = task.record.hooks.on_tensors.items()
    hooked_elsewhere = frozenset(address for address, value in hooks if value in part.received)
    ends = (part.first, part.last) if task.costs else ()
    marks = frozenset(number for number in ends if 0 < number < len(events))
    marked = {events[n].address: n for n in marks if not events[n].is_unit}
    special = frozenset[Address](
        {*received, *sent, *acted, *marked, *answers, *random, *hooked_elsewhere}
    )
    compared = {call for each in task.own_path.values() for call, _ in each.calls}
    return Watched(
        special | compared, special, received, sent, answers, random, hooked_elsewhere, marks,
        marked,
    )  # fmt: skip


def crossing(values: Mapping[int, tuple[Address, Any]], *, units: bool) -> dict[Address, Slots]:
    """Values by the addresses of their makers, of ``units`` or of calls between them."""
    found: dict[Address, dict[Any, int]] = {}
    for value, (address, slot) in values.items():
        if (len(address) == 2) == units:
            found.setdefault(address, {})[slot] = value
    return dict(found)


def whole_loss(task: StageTask, watched: Watched) -> Address | None:
    """The address of the call that is the whole loss, if no other is to be seen.

    To watch a call takes as long as a layer; one of torch's functions is called instead.
    """
    if task.probes or len(watched.addresses) != 1:
        return None
    (only,) = watched.addresses
    events = task.record.events
    own = (n for n in task.actions if events[n].address == only)
    makes = any(task.part.makes(n, events[n]) for n in own)
    return only if makes and task.record.by_address[only].func is task.program.loss else None
