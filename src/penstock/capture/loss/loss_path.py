"""The path of a loss: the calls that decide how its parts count, which every run must repeat.

    recorded   cross_entropy(reduction="mean")   mse_loss   __mul__   __add__
    later      cross_entropy(reduction="sum")    ...                             another path
    later      cross_entropy(reduction="mean")   mse_loss   __mul__   __add__   mean   another path
    later      the same, and the mean enters nothing of it, since it is only printed       the same

A path has segments: the calls that follow on one call of a unit. Those are compared in which
something decides about the loss. Values are no part of it: factors, weights of classes, smoothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from penstock.capture.record.absent import VALUES, writes_first
from penstock.capture.record.calls import (
    Address,
    ProgramRecord,
    RecordedCall,
    TensorReference,
)
from penstock.capture.record.user_lines import line_with_source
from penstock.torch_internals import pytree, tensors_in

Constants: TypeAlias = tuple[Any, ...]

OVER_DIMENSIONS = frozenset(
    ["mean", "sum", "nansum", "softmax", "log_softmax", "logsumexp", "norm"]
)
"""Calls whose whole numbers say over what they go; those of others may be sizes or factors."""


class OtherPath(BaseException):
    """The loss has taken another path than recorded; no `Exception`, so that users let it pass."""


@dataclass(frozen=True)
class Segment:
    """The calls after one call of a unit, from event ``first`` to ``last``.

    ``calls`` are in order, or in any number and order if they are not ``steady``: batches of other
    sizes make others. Those in ``passed`` are an earlier stage's, which compares them: here they
    may be left out with the block that makes them. ``writes`` are recorded calls that write to what
    the loss does not read any more, as a count of batches.
    """

    first: int
    last: int
    calls: tuple[tuple[Address, Constants], ...]
    steady: bool = True
    writes: frozenset[Address] = frozenset()
    passed: frozenset[Address] = frozenset()

    def within(self, events: Sequence[RecordedCall], first: int) -> "Segment":
        """The part of it from event ``first`` on, as a stage compares it."""
        passed = frozenset(event.address for event in events[self.first : first])
        calls = tuple(call for call in self.calls if call[0] not in passed)
        return replace(self, calls=calls, passed=passed)


LossPath: TypeAlias = Mapping[Address | None, Segment]
"""Segments by the call of the unit that they follow on."""


def loss_path(
    record: ProgramRecord,
    others: Sequence[ProgramRecord],
    loss: int,
    deciding: Collection[int],
) -> LossPath:
    """The path of a loss, a value of ``record``, about which the events ``deciding`` decide.

    ``others`` are recordings of batches of other sizes.
    """
    events, maker = record.events, record.values[loss].maker
    found: dict[Address | None, Segment] = {}
    if events[maker].func is record.program.loss:  # one of torch's functions is all of it
        return found
    ends = events[maker].address
    calls = [calls_behind(each, ends) for each in (record, *others)]
    for anchor in {events[n].address[0] for n in deciding if not events[n].is_unit}:
        if anchor == "" or (anchor is not None and anchor[1] == -1):
            continue  # a leaf of the batch; or batches of other sizes call the unit more often
        own = [number for number, (address, _) in calls[0].items() if address[0] == anchor]
        if not own:
            continue
        made = [tuple(c for c in each.values() if c[0][0] == anchor) for each in calls]
        steady = len(set(made)) == 1
        every = made[0] if steady else tuple({call: None for each in made for call in each})
        writes = frozenset(
            event.address
            for number, event in enumerate(events)
            if event.address[0] == anchor and number not in calls[0] and not event.is_unit
            if writes_first(str(event.address[1]))
        )
        found[anchor] = Segment(min(own), max(own) + 1, every, steady, writes)
    return found


def calls_behind(record: ProgramRecord, loss: Address) -> dict[int, tuple[Address, Constants]]:
    """The calls between units that the loss is made of, by number of event."""
    events = record.events
    behind = record.behind(n for n, event in enumerate(events) if event.address == loss)
    read = {value for number in behind for value in events[number].reads}
    return {
        number: (event.address, constants_of(event.address[1], *event.args))
        for number, event in enumerate(events)
        # A call that returned its argument as it came, as to(), may make another tensor later.
        if (number in behind or not read.isdisjoint(event.makes)) and not event.is_unit
        if not (event.reads_values or isinstance(event.func, type))
        # Without tensors in its arguments, what is made is a constant.
        if any(isinstance(leaf, TensorReference) for leaf in pytree.tree_leaves(event.args))
    }


def constants_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Constants:
    """Return the arguments that decide over what a call goes: words, flags, dimensions, and how
    many tensors there are."""
    if name.startswith("__") or "dropout" in name:  # arithmetic and indices; a flag of the mode
        return ()
    over = name in OVER_DIMENSIONS
    found: list[Any] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        kind = type(value)
        if kind is str or kind is bool or (kind is int and over):
            found.append((key, value))
        elif kind is list or kind is tuple:
            plain = over and all(type(entry) is int for entry in value)
            found.append((key, tuple(value) if plain else len(value)))
    return tuple(found)


class PathGuard:
    """Comparison of the calls of a run with a path, segment by segment."""

    def __init__(self, path: LossPath) -> None:
        self._path = path
        self._segment: Segment | None = None
        self._place = 0
        self._unknown = dict[int, tuple[torch.Tensor, str]]()
        """Tensors that calls without a record have made, by identity, with these calls."""
        self._unsteady = dict[Address, set[Constants]]()
        for segment in path.values():
            for address, constants in () if segment.steady else segment.calls:
                self._unsteady.setdefault(address[:3], set()).add(constants)

    @property
    def is_on(self) -> bool:
        """Return whether the calls that come now are compared."""
        return self._segment is not None

    def begin(self, anchor: Address | None) -> None:
        """The calls after this call of a unit come next."""
        self._segment, self._place = self._path.get(anchor), 0

    def end(self, loss: Any = None) -> None:
        """End this segment: no more calls come in it, and none at all if the ``loss`` is made."""
        segment, self._segment = self._segment, None
        if segment is not None and segment.steady and self._place < len(segment.calls):
            _, name, line, _ = segment.calls[self._place][0]
            raise OtherPath(f"'{name}' at {line_with_source(line)} is not called")
        if self._unknown:
            self._check(loss)

    def stop(self) -> None:
        """Compare no further; some calls are another stage's."""
        self._segment = None
        self._unknown.clear()

    def _check(self, given: Any) -> None:
        """Raise `OtherPath` if a tensor in ``given`` was made by a call without a record."""
        for tensor in tensors_in(given):
            if id(tensor) in self._unknown:
                raise OtherPath(self._unknown[id(tensor)][1])

    def call(
        self, call: Callable[..., Any], address: Address, func: Any, args: Any, kwargs: Any
    ) -> Any:
        """The result of ``call``, whose place in the path is looked up."""
        segment, name = self._segment, address[1]
        if segment is None or name in VALUES or address in segment.passed:
            return call(address, func, args, kwargs)
        if segment.steady:
            place = self._place
            known = place < len(segment.calls) and segment.calls[place][0] == address
            same = known and segment.calls[place][1] == constants_of(name, args, kwargs)
            self._place += known
        else:
            of_place = self._unsteady.get(address[:3], ())
            known = bool(of_place)
            # Where there are several, sizes decide about them.
            same = len(of_place) > 1 or constants_of(name, args, kwargs) in of_place
        if known:
            if self._unknown:
                self._check((args, kwargs))
            if not same:
                raise OtherPath(f"'{name}' at {line_with_source(address[2])} is called otherwise")
            return call(address, func, args, kwargs)
        what = f"'{name}' at {line_with_source(address[2])} is called"
        if (
            address not in segment.writes
            and writes_first(name)
            and id(args[0]) not in self._unknown
        ):
            raise OtherPath(what)
        result = call(address, func, args, kwargs)
        given = set(map(id, tensors_in((args, kwargs))))
        for tensor in tensors_in(result):
            if given and id(tensor) not in given:
                self._unknown[id(tensor)] = tensor, what
        return result
