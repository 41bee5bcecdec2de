"""Cut a recorded program into layers, and find what crosses from one to another.

A layer is a run of events that begins at a heavy call: of a unit that holds a matrix, or of a
function that reads one. The last layer is the loss. Between two heavy calls, the cut is where the
fewest bytes cross:

    block.attention   dropout   add   block.norm   block.mlp
                    2         2 tensors          2          cut after add: 1 tensor
                                    ^
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

from torch import nn

from penstock.capture.chain import Chain
from penstock.capture.contract import ParameterUse, TensorSpec
from penstock.capture.record.calls import RecordedCall
from penstock.capture.record.example import Recorded
from penstock.capture.record.model_and_loss import LOSS, UserProgram
from penstock.capture.record.sizes import BatchSize, Formula, Size
from penstock.capture.tensor_parts import value_bytes

_COST_OF_UNORDERED_ROWS = 1 << 60

_PRODUCTS = frozenset(
    [
        *("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "embedding"),
        *("conv1d", "conv2d", "conv3d", "bilinear", "tensordot", "baddbmm", "mv"),
    ]
)
_VIEWS = frozenset(["view", "reshape", "flatten", "contiguous", "clone", "unflatten"])


@dataclass(frozen=True)
class LengthFormula:
    """A size, for one sample, as a formula of the lengths of a batch."""

    formula: Size

    def at(self, lengths: Sequence[int]) -> int:
        """The size for these lengths."""
        return self.formula.at(BatchSize(1, tuple(lengths)))


@dataclass(frozen=True)
class LayerCrossing:
    """A value that layers after its maker read."""

    value: int
    maker: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Place of the samples of a value: dimension ``dim`` (-1: none) has ``each`` rows a sample."""

    dim: int
    each: Size


_ONE = Formula((((), 1),))


class Cut:
    """The layers of a record: ``names``, and the event at which each begins, then the end.

    ``heads`` are the calls at which layers may begin, by name. ``kinds`` are the cuts of all kinds
    of batches of the model, this one among them.
    """

    def __init__(self, recorded: Recorded, program: UserProgram) -> None:
        self.recorded, self.record = recorded, recorded.record
        self.program = program
        self.end = len(self.record.events)
        self.kinds: tuple[Cut, ...] = (self,)
        self._find_readers()
        self.set_layers(*self._layers())

    def set_layers(self, names: Sequence[str], bounds: Sequence[int]) -> None:
        """Let the layers be these."""
        self.names, self.bounds = tuple(names), tuple(bounds)
        self.layer_of = [0] * self.end
        for layer, (lo, hi) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            self.layer_of[lo:hi] = [layer] * (hi - lo)

    # Values.

    def _find_readers(self) -> None:
        """Find the calls that read, or request contents of, each value that depends on stages."""
        record = self.record
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.value_readers: dict[int, list[int]] = defaultdict(list)
        for number, event in enumerate(record.events):
            for value in event.reads:
                if value in record.dependent and record.values[value].maker < number:
                    (self.value_readers if event.reads_values else self.readers)[value].append(
                        number
                    )
        self.readers[self.recorded.loss].append(self.end - 1)

    @cached_property
    def _rows(self) -> list[Rows | None]:
        """Place of the samples of each value; None if its size is no multiple of the samples."""
        return [self._rows_of(formulas) for formulas in self.recorded.sizes.formulas]

    def _rows_of(self, formulas: tuple[Size, ...] | None) -> Rows | None:
        if formulas is None:
            return None
        found = [(dim, formula) for dim, formula in enumerate(formulas) if formula.has_samples]
        if not found:
            return Rows(-1, _ONE)
        if len(found) > 1:
            return None
        each = found[0][1].each_sample()
        return None if each is None else Rows(found[0][0], each)

    def can_cross(self, value: int) -> bool:
        """Return whether a value can be sent: known size, and made where it can be taken."""
        return self.record.values[value].crossable and self.has_rows(value)

    def has_rows(self, value: int) -> bool:
        """Return whether a value has its samples along one dimension, or none."""
        return self._rows[value] is not None

    @cached_property
    def _ordered(self) -> set[int]:
        """Values with several rows a sample that are known to be sample after sample."""
        found: set[int] = set()
        for number, rows in enumerate(self._rows):
            if rows is None or rows.dim != 0 or rows.each == _ONE:
                continue
            event = self.record.events[self.record.values[number].maker]
            if event.address[0] == "" or self._keeps_order(event, rows, found):
                found.add(number)
        return found

    def _keeps_order(self, event: RecordedCall, rows: Rows, ordered: set[int]) -> bool:
        """Return whether a call keeps order and number of rows, or flattens samples in order."""
        for value in event.reads:
            own = self._rows[value]
            if own is None or own.dim != 0:
                continue
            if own.each == rows.each and value in ordered:
                return True
            if own.each == _ONE and not event.is_unit and event.address[1] in _VIEWS:
                return True
        return False

    def spec(self, value: int, name: str = "", *, requires_grad: bool | None = None) -> TensorSpec:
        """A value as a tensor that is sent."""
        known, rows = self.record.values[value], self._rows[value]
        formulas = self.recorded.sizes.formulas[value]
        assert rows is not None and formulas is not None
        samples = self.recorded.size.samples
        lengths = self.recorded.size.lengths
        if rows.dim < 0:
            reduced = known.of_batch
        else:
            reduced = rows.each != _ONE and value not in self._ordered
        varying = tuple(
            (dim, LengthFormula(formula))
            for dim, formula in enumerate(formulas)
            if dim != rows.dim and not formula.is_constant
        )
        each = rows.each.at(BatchSize(samples, lengths))
        return TensorSpec(
            name or f"v{value}",
            tuple(formula.at(self.recorded.size) for formula in formulas),
            known.dtype,
            rows.dim,
            each,
            self._needs_grad[value] if requires_grad is None else requires_grad,
            reduced,
            varying,
            None if rows.each.is_constant else LengthFormula(rows.each),
        )

    @cached_property
    def _trained(self) -> tuple[bool, ...]:
        """True for each parameter that requires a gradient now."""
        return self._flags()

    def _flags(self) -> tuple[bool, ...]:
        try:
            return tuple(place[key].requires_grad for place, key in self._places)
        except KeyError:
            for name in self.program.tensors.parameters:
                self.program.places(name)  # says which is gone
            raise

    @cached_property
    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """Places of the parameters; a model from the meta device gets others than it had."""
        return [self.program.places(name) for name in self.program.tensors.parameters]

    @cached_property
    def _needs_grad(self) -> list[bool]:
        """True for each value that requires a gradient: it would, and is made of trained ones."""
        tensors = self.program.tensors
        trained = dict(zip(tensors.parameters, self._trained, strict=True))
        of_unit: dict[str, bool] = {}
        found = [False] * len(self.record.values)
        for number, event in enumerate(self.record.events):
            needs = any(found[value] for value in event.reads)
            needs = needs or any(trained[tensors.tied.get(n, n)] for n in event.params)
            if event.is_unit and not needs:
                path = event.address[0]
                if path not in of_unit:
                    own = self.program.module(path).parameters()
                    of_unit[path] = any(parameter.requires_grad for parameter in own)
                needs = of_unit[path]
            for value in event.makes:
                known = self.record.values[value]
                if known.maker == number:
                    found[value] = needs and known.grad
        return found

    @property
    def changed_flags(self) -> list[str]:
        """Parameters whose ``requires_grad`` is another than when specs were made."""
        now = self._flags()
        if now == self._trained:
            return []
        names = self.program.tensors.parameters
        return [n for n, old, new in zip(names, self._trained, now, strict=True) if old != new]

    def follow_flags(self) -> bool:
        """Take up which parameters require a gradient now; returns whether that has changed."""
        if not self.changed_flags:
            return False
        for cut in self.kinds:
            for name in ("_trained", "_needs_grad", "parameter_uses"):
                cut.__dict__.pop(name, None)
        return True

    # Layers.

    def _layers(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        heavy = self._heavy_events()
        start = self.recorded.whole_from
        if start is None:
            start = self._start_of_loss(heavy[-1][0])
        if start is not None:
            heavy.append((start, LOSS))
        self.heads = dict(zip(distinct([n for _, n in heavy]), (p for p, _ in heavy), strict=True))
        costs = self._costs()
        names, bounds = [heavy[0][1]], [0]
        for (before, _), (number, name) in pairwise(heavy):
            if number == self.recorded.whole_from:
                own = self.record.events[:number]
                trained = (n for n, event in enumerate(own) if self._is_trained(event))
                before = max(trained, default=before)
            places = [p for p in range(before + 1, number + 1) if costs[p] is not None]
            if places:
                # At equal cost the last, so that what follows a product is in its layer.
                bounds.append(min(places, key=lambda p: (costs[p] or 0, -p)))
                names.append(name)
        return distinct(names), (*bounds, self.end)

    def _is_trained(self, event: RecordedCall) -> bool:
        """Return whether a call reads parameters."""
        module = self.program.module(event.address[0]) if event.is_unit else None
        return bool(event.params) or (module is not None and any(True for _ in module.parameters()))

    @property
    def has_whole_loss(self) -> bool:
        """Return whether the last layer is a loss, computable once on all samples of a step.

        What enters it has its samples one after another, or is no matter of samples. Nothing in it
        is trained, drawn or changed.
        """
        record, first, last = self.record, self.bounds[-2], len(self.names) - 1
        writes = (number for numbers in record.buffer_writes.values() for number in numbers)
        return not (
            self.recorded.whole_from is None
            or self.recorded.changes_again
            or self.recorded.draws_python
            or record.is_temporary
            or any(map(self._is_trained, record.events[first:]))
            or any(event.random and not event.depends for event in record.events)
            or any(event.random for event in record.events[first:])
            or any(number >= first for number in writes)
            or any(self.spec(c.value).reduced for c in self.crossings if last in c.readers)
        )

    def _start_of_loss(self, heavy: int) -> int | None:
        """The call that begins the loss: of the loss function the first.

        Where the model returns its loss, the first after the last heavy call that is called so, or
        else makes a number. None if nothing comes after the last heavy call.
        """
        later = [n for n in range(heavy + 1, self.end) if self.record.events[n].depends]
        if self.program.loss is not None:
            return next((n for n in later if n >= self.record.model_end), None)
        for number in later:
            name = str(self.record.events[number].address[1])
            if "loss" in name or name == "cross_entropy":
                return number
        for number in later:
            made = [self.record.values[value] for value in self.record.events[number].makes]
            if any(value.maker == number and not value.shape for value in made):
                return number
        return None

    def _heavy_events(self) -> list[tuple[int, str]]:
        """Return the events at which layers may begin, each with its name."""
        found: list[tuple[int, str]] = []
        looked_up = False
        is_chain = isinstance(self.program.model, Chain)
        tensors = self.program.tensors
        for number, event in enumerate(self.record.events):
            name = ""
            looks_up = False
            if event.is_unit:
                module = self.program.module(event.address[0])
                looks_up = isinstance(module, nn.Embedding) and not is_chain
                if is_chain or any(parameter.dim() > 1 for parameter in module.parameters()):
                    name = event.address[0]
            elif event.params and event.address[1] in _PRODUCTS:
                first = [tensors.tied.get(name, name) for name in event.params]
                large = [n for n in first if tensors.parameters[n].dim() > 1]
                name = large[0].rpartition(".")[0] or large[0] if large else ""
                looks_up = event.address[1] == "embedding"
            if not name:
                continue
            same = bool(found) and found[-1][1] == name and not event.is_unit
            if not same and not (looks_up and looked_up):
                found.append((number, name))
            looked_up = looks_up
        if found:
            return found
        units = [(n, e.address[0]) for n, e in enumerate(self.record.events) if e.is_unit]
        return units or [(0, "forward")]

    def _costs(self) -> list[int | None]:
        """The bytes that cross each place, before event ``p``; None where nothing can be cut."""
        change, blocked = [0] * (self.end + 2), [0] * (self.end + 2)
        for value in {*self.readers, *self.value_readers}:
            known = self.record.values[value]
            made = known.maker
            # Control flow on values is every later stage's.
            last = self.end - 1 if value in self.value_readers else max(self.readers[value])
            if last <= made:
                continue
            if not self.can_cross(value):
                blocked[made + 1] += 1
                blocked[last + 1] -= 1
                continue
            spec = self.spec(value)
            cost = prod(known.shape) * known.dtype.itemsize
            if (spec.reduced and spec.batch_dim >= 0) or value in self.recorded.sizes.decided:
                cost += _COST_OF_UNORDERED_ROWS
            change[made + 1] += cost
            change[last + 1] -= cost
        for first, last in self.record.regions:
            blocked[first + 1] += 1
            blocked[max(first + 1, last)] -= 1
        costs: list[int | None] = []
        total = barred = 0
        for place in range(self.end + 1):
            total, barred = total + change[place], barred + blocked[place]
            costs.append(None if barred else total)
        return costs

    # What crosses.

    @cached_property
    def crossings(self) -> tuple[LayerCrossing, ...]:
        """Values that layers after the maker's read, in order of execution."""
        return self.crossings_for(frozenset(range(self.end)), ())

    def crossings_for(
        self, needed: frozenset[int], returned: Iterable[int]
    ) -> tuple[LayerCrossing, ...]:
        """Return the crossings that calls ``needed`` read; the last layer reads ``returned``."""
        layers = len(self.names)
        wanted = set(returned)
        found: list[LayerCrossing] = []
        for value in sorted({*self.readers, *self.value_readers, *wanted}):
            maker = self.layer_of[self.record.values[value].maker]
            own = {self.layer_of[n] for n in self.readers.get(value, ()) if n in needed}
            for number in self.value_readers.get(value, ()):
                own |= set(range(self.layer_of[number], layers)) if number in needed else set()
            if value in wanted:
                own.add(layers - 1)
            readers = tuple(sorted(layer for layer in own if layer > maker))
            if readers:
                found.append(LayerCrossing(value, maker, readers))
        return tuple(found)

    def leaves_of(self, events: Iterable[int]) -> frozenset[int]:
        """The leaves of the batch that these events read."""
        return frozenset(leaf for n in events for leaf in self.record.events[n].leaves)

    def place_of(self, layer: int, other: "Cut") -> int | None:
        """Return where ``layer`` of another kind of batch begins: between the same calls of units.

        None if layers cannot be cut there. What only this kind calls goes with the layer before.
        """
        start = other.bounds[layer]
        common = [
            (place < start, self.heads[n]) for n, place in other.heads.items() if n in self.heads
        ]
        before = max((own for earlier, own in common if earlier), default=-1)
        after = min((own for earlier, own in common if not earlier), default=self.end)
        return max((p for p in self.bounds[:-1] if before < p <= after), default=None)

    def follow(self, other: "Cut") -> bool:
        """Let the layers be those of ``other``, each with what is called there; whether they can.

        So each stage has the parameters that its calls read, whatever is called besides.
        """
        costs, bounds, last = self._costs(), [0], len(other.names)
        where: list[set[int]] = [set(range(last))] * self.end
        for name, events in self._readers_of.items():
            layers = other._users.get(name) or {0}
            for number in events:
                where[number] = where[number] & layers
        for layer in range(1, last):
            fits = [
                place
                for place in range(bounds[-1], self.end + 1)
                if costs[place] is not None
                and all(min(own, default=last) < layer for own in where[bounds[-1] : place])
                and all(max(own, default=-1) >= layer for own in where[place:])
            ]
            if not fits:
                return False
            own = [place for place in fits if place in self.bounds[:-1]] or fits
            bounds.append(min(own, key=lambda p: (costs[p] or 0, -p)))
        self.kinds = (self, *other.kinds)
        self.set_layers(other.names, (*bounds, self.end))
        return all(self.layer_of[number] in own for number, own in enumerate(where))

    def units_elsewhere(self, layers: range) -> set[str]:
        """The units that no kind of batch calls in these layers, but in others."""
        own, every = set[str](), set[str]()
        for cut in self.kinds:
            for number, event in enumerate(cut.record.events):
                if event.is_unit:
                    every.add(event.address[0])
                    if cut.layer_of[number] in layers:
                        own.add(event.address[0])
        return every - own

    @property
    def _users(self) -> Mapping[str, set[int]]:
        """The layers that read a parameter or buffer."""
        found: dict[str, set[int]] = {}
        for name, events in self._readers_of.items():
            found[name] = {self.layer_of[number] for number in events}
        return found

    @cached_property
    def _readers_of(self) -> Mapping[str, set[int]]:
        """The events that read a parameter or buffer."""
        tensors = self.program.tensors
        users: dict[str, set[int]] = defaultdict(set)
        for number, event in enumerate(self.record.events):
            names = [*event.params, *(event.buffers if event.depends else ())]
            if event.is_unit:
                path = event.address[0]
                module = self.program.module(path)
                held = (
                    *module.named_parameters(remove_duplicate=False),
                    *module.named_buffers(remove_duplicate=False),
                )
                names += [f"{path}.{name}" for name, _ in held]
            for name in names:
                users[tensors.tied.get(name, name)].add(number)
        for name, numbers in self.record.local_buffers.items():
            users[tensors.tied.get(name, name)] |= {*numbers}
        return users

    def last_layer_under(self, path: str) -> int:
        """The last layer that calls a unit in the module ``path``; else the last of all.

        Code between units runs on all stages, to its end on the last.
        """
        called = [
            self.layer_of[number]
            for number, event in enumerate(self.record.events)
            if path and event.is_unit
            if f"{event.address[0]}.".startswith(f"{path}.")
            or path.startswith(f"{event.address[0]}.")
        ]
        return max(called, default=len(self.names) - 1)

    @cached_property
    def parameter_uses(self) -> tuple[ParameterUse, ...]:
        """Every parameter and buffer, with the layers that read it in batches of some kind.

        Buffers of no unit are every layer's: all stages run the code between units. Parameters that
        nothing reads are the first layer's.
        """
        tensors = self.program.tensors
        users: dict[str, set[int]] = defaultdict(set)
        for cut in self.kinds:
            for name, layers in cut._users.items():
                users[name] |= layers
        every = range(len(self.names))
        found: list[ParameterUse] = []
        for held, is_buffer in ((tensors.parameters, False), (tensors.buffers, True)):
            for name, tensor in held.items():
                size = value_bytes(tensor)
                own = sorted(users.get(name) or (every if is_buffer else {0}))
                found.append(ParameterUse(name, tuple(own), size, tensor.requires_grad, is_buffer))
        return tuple(found)


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names; repeated ones get the suffix ``#2``, ``#3``."""
    seen: Counter[str] = Counter()
    found: list[str] = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(found)
