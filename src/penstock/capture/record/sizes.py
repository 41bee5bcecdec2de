"""Sizes as formulas of the samples and lengths of a batch, from recordings of several batches.

    recorded     4 samples, length 16    3 samples, length 16    4 samples, length 13
    a size                64                     48                      52           = n L

The first formula that explains all recordings is taken. A size that only the lengths keep from one,
such as ``(length + 3) // 4``, is found by recording at these lengths. One that no formula of the
samples explains is not known for other batches; values of such a size are not sent between stages.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any, TypeAlias

from penstock.capture.record.absent import MASKS, writes_first
from penstock.capture.record.calls import ProgramRecord, RecordedCall, TensorReference


@dataclass(frozen=True)
class BatchSize:
    """The samples and the lengths of a batch."""

    samples: int
    lengths: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Samples first."""
        return self.samples, *self.lengths


@dataclass(frozen=True)
class Formula:
    """A size: the sum of ``factor`` times a product, over ``terms`` (product, factor).

    A product is given by the indices of its numbers: ``(0, 1)`` is samples times the first length.

    >>> Formula((((0, 1), 2), ((), 1))).at(BatchSize(4, (16,)))
    129
    """

    terms: tuple[tuple[tuple[int, ...], int], ...]

    def at(self, size: BatchSize) -> int:
        """The size for a batch."""
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return sum(factor * prod(size.numbers[i] for i in which) for which, factor in self.terms)

    @cached_property
    def has_samples(self) -> bool:
        """Return whether the size depends on the number of samples."""
        return any(0 in which for which, _ in self.terms)

    @cached_property
    def is_constant(self) -> bool:
        """Return whether the size is the same for all batches."""
        return all(not which for which, _ in self.terms)

    def each_sample(self) -> "Formula | None":
        """The size a sample, if the whole is that many times the samples."""
        if not self.terms or any(which[:1] != (0,) for which, _ in self.terms):
            return None
        return Formula(tuple((which[1:], factor) for which, factor in self.terms))


@dataclass(frozen=True)
class SizeAtLengths:
    """A size that is found by recording: that of dimension ``dim`` of the value with this ``key``.

    With ``samples`` (a recording's number of them) it is a multiple of the samples.
    """

    shapes_at: Callable[[tuple[int, ...]], Mapping[Any, tuple[int, ...]]]
    key: Any
    dim: int
    samples: int = 0
    each: bool = False
    is_constant = False

    def at(self, size: BatchSize) -> int:
        """The size for a batch."""
        found = self.shapes_at(size.lengths)[self.key][self.dim]
        return found // self.samples * (1 if self.each else size.samples) if self.samples else found

    @property
    def has_samples(self) -> bool:
        """Return whether the size depends on the number of samples."""
        return self.samples > 0 and not self.each

    def each_sample(self) -> "SizeAtLengths | None":
        """The size a sample, if the whole is that many times the samples."""
        return replace(self, each=True) if self.has_samples else None


Size: TypeAlias = Formula | SizeAtLengths


class ValueSizes:
    """The shapes of the values of ``recordings[0]`` as formulas.

    Calls are matched by address, so those that only some recordings have are simply unknown.
    """

    def __init__(
        self,
        recordings: Sequence[ProgramRecord],
        batches: Sequence[BatchSize],
        shapes_at: Callable[[tuple[int, ...]], Mapping[Any, tuple[int, ...]]] | None = None,
    ) -> None:
        first, *others = recordings
        self.batches = batches
        self._shapes_at = shapes_at
        shapes = [shapes_of(recording) for recording in others]
        self._known: dict[tuple[int, ...], Mapping[Any, tuple[int, ...]]] = {
            batches[0].lengths: shapes_of(first)
        }
        self.formulas: list[tuple[Size, ...] | None] = []
        self._is_at_lengths = False
        sizes: list[list[tuple[int, ...]]] = []
        for value in first.values:
            key = first.events[value.maker].address, value.slot
            found = [value.shape, *(known.get(key) for known in shapes)]
            dims = sizes_of_dims(found)
            self.formulas.append(None if dims is None else self._fitted(key, dims))
            sizes.append(dims or [])
        self._called_by_sample(first)
        self.decided: set[int] = set()
        """Values with a size that values of the batch decide about, though it may have a formula:
        that of all of a mask, if all of it is true in the example."""
        for number, is_whole in decided_by_values(first, sizes):
            self.decided.add(number)
            if not is_whole:
                self.formulas[number] = None

    def shapes_at(self, lengths: tuple[int, ...]) -> Mapping[Any, tuple[int, ...]]:
        """The shapes of all values at these lengths, by address and slot; recorded once."""
        found = self._known.get(lengths)
        if found is None:
            assert self._shapes_at is not None
            found = self._known[lengths] = dict(self._shapes_at(lengths))
        return found

    def find(self, lengths: tuple[int, ...]) -> None:
        """Record the shapes at these lengths now, if any of them is without a formula."""
        if self._is_at_lengths:
            self.shapes_at(lengths)

    def _called_by_sample(self, first: ProgramRecord) -> None:
        """Give calls of a module that is called once for each sample the first call's shapes."""
        places: dict[object, int] = {}
        for number, value in enumerate(first.values):
            event = first.events[value.maker]
            if not event.is_unit:
                continue
            formula = self.formulas[places.setdefault((event.address[0], value.slot), number)]
            if formula is None or self.formulas[number] is not None:
                continue
            if not all(size.is_constant for size in formula):
                continue
            if tuple(size.at(self.batches[0]) for size in formula) == value.shape:
                self.formulas[number], value.crossable = formula, False

    def _fitted(self, key: Any, dims: Sequence[tuple[int, ...]]) -> tuple[Size, ...] | None:
        found: list[Size] = []
        for dim, sizes in enumerate(dims):
            if min(sizes) < 0:
                return None
            formula = fitted(self.batches, sizes) or self._found_by_length(key, dim, sizes)
            if formula is None:
                return None
            found.append(formula)
        return tuple(found)

    def _found_by_length(self, key: Any, dim: int, sizes: Sequence[int]) -> Size | None:
        """A size that is constant, or a multiple of the samples, at the example's lengths."""
        samples, lengths = self.batches[0].samples, self.batches[0].lengths
        if self._shapes_at is None or not lengths:
            return None
        own = [
            (b.samples, n) for b, n in zip(self.batches, sizes, strict=True) if b.lengths == lengths
        ]
        is_constant = len({size for _, size in own}) == 1
        is_multiple = all(size * samples == sizes[0] * count for count, size in own)
        if not is_constant and (not is_multiple or sizes[0] % samples):
            return None
        self._is_at_lengths = True
        return SizeAtLengths(self.shapes_at, key, dim, 0 if is_constant else samples)

    def shape(self, value: int, size: BatchSize) -> tuple[int, ...] | None:
        """The shape of a value in a batch of this size; None if it is not known."""
        formulas = self.formulas[value]
        return None if formulas is None else tuple(formula.at(size) for formula in formulas)

    def has_samples(self, value: int) -> bool:
        """Return whether a size of the value depends on the number of samples, or is unknown."""
        formulas = self.formulas[value]
        return formulas is None or any(formula.has_samples for formula in formulas)

    @property
    def any_shrinks(self) -> bool:
        """Return whether a size shrinks with more samples: the batch was taken apart wrongly."""
        known = (size for sizes in self.formulas if sizes is not None for size in sizes)
        return any(
            isinstance(size, Formula) and any(0 in which and n < 0 for which, n in size.terms)
            for size in known
        )

    def is_proportional(self, value: int) -> bool:
        """Return whether the number of elements is a multiple of the samples."""
        formulas = self.formulas[value]
        if formulas is None or value in self.decided:
            return False
        return any(formula.each_sample() is not None for formula in formulas)


def shapes_of(recording: ProgramRecord) -> dict[Any, tuple[int, ...]]:
    """The shapes of all values, by the address of their maker and their slot there."""
    events = recording.events
    return {(events[v.maker].address, v.slot): v.shape for v in recording.values}


_LIKE_THE_FIRST = frozenset(
    [
        *("masked_fill", "masked_scatter", "scatter", "scatter_add", "scatter_reduce"),
        *("index_add", "index_copy", "index_fill", "index_put"),
    ]
)
"""Calls whose result is as large as their first argument, whatever the others are."""


def sizes_of_dims(shapes: Sequence[tuple[int, ...] | None]) -> list[tuple[int, ...]] | None:
    """Return the sizes of each dimension of a value in all recordings; None if one is missing."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({len(shape) for shape in known}) > 1:
        return None
    return list(zip(*known, strict=True))


def decided_by_values(
    record: ProgramRecord, sizes: Sequence[Sequence[tuple[int, ...]]]
) -> Iterator[tuple[int, bool]]:
    """Values with a size that values of the batch decide about, as in ``h[mask]``.

    Such a size may look like a formula: all of a mask is true in the example (then, with True, it
    is a size of the batch or of an argument), or an expert has no token. ``sizes`` are those of
    each dimension of each value, in all recordings. What is made of such a value has such a size if
    it has the same sizes in all recordings, or others that no argument has, nor the batch.
    """
    of_batch: set[int] = set()
    given: set[tuple[int, ...]] = set()
    decided: dict[int, dict[tuple[int, ...], bool]] = {}
    for number, (value, own) in enumerate(zip(record.values, sizes, strict=True)):
        event = record.events[value.maker]
        if event.address[0] == "":
            of_batch.add(number)
            given.update(own)
        if not of_batch.intersection(event.reads):
            continue
        of_batch.add(number)
        name = str(event.address[1])
        reads = event.reads[:1] if writes_first(name) or name in _LIKE_THE_FIRST else event.reads
        bad: dict[tuple[int, ...], bool] = {}
        for read in reads:
            bad |= decided.get(read, {})
        place = _decided_dim(event, value.slot, of_batch)
        if not bad and place is None:
            continue
        known = given.union(*(sizes[read] for read in reads))
        if bad:
            new = (size for size in own if len(set(size)) > 1 and size not in known)
            bad |= dict.fromkeys(new, all(bad.values()))
        bad = {size: is_whole for size, is_whole in bad.items() if size in own}
        if place is not None and place < len(own):
            bad[own[place]] = own[place] in known
        if bad:
            decided[number] = bad
            yield number, all(bad.values())


def _decided_dim(event: RecordedCall, slot: Any, of_batch: Collection[int]) -> int | None:
    """The dimension of a call's result whose size its arguments' values decide about."""
    if event.is_unit or event.args is None:
        return None
    (args, kwargs), name = event.args, event.address[1]

    def decides(entry: Any) -> bool:
        return isinstance(entry, TensorReference) and entry.value in of_batch

    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [decides(entry) and entry.dtype in MASKS for entry in index]
        if not any(masks):
            return None
        taken = sum(
            len(entry.shape) if mask else entry is not None and entry is not Ellipsis
            for entry, mask in zip(index, masks, strict=True)
        )
        before = index[: masks.index(True)]
        rest = len(args[0].shape) - taken if Ellipsis in before else 0
        return rest + sum(entry is None or isinstance(entry, slice) for entry in before)
    if name == "where" and len(args) + len(kwargs) > 1:
        return None
    if name == "unique":
        return None if slot == 1 else 0  # the second result is the place of each entry
    return 0 if name in ("nonzero", "argwhere", "where", "masked_select") else None


def fitted(batches: Sequence[BatchSize], sizes: Sequence[int]) -> Formula | None:
    """The first formula that gives all sizes; None if there is none.

    >>> fitted([BatchSize(4), BatchSize(3), BatchSize(3)], [9, 7, 7])
    Formula(terms=(((), 1), ((0,), 2)))
    """
    if len(set(sizes)) == 1:
        return Formula((((), sizes[0]),))
    found: list[Formula] = []
    for products in products_of_sizes(len(batches[0].numbers)):
        rows = [[prod(b.numbers[i] for i in which) for which in products] for b in batches]
        factors = solved(rows, sizes)
        if factors is not None:
            terms = zip(products, factors, strict=True)
            found.append(Formula(tuple((which, factor) for which, factor in terms if factor)))
    return min(found, key=lambda formula: len(formula.terms), default=None)


def products_of_sizes(numbers: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs of products, the simplest first."""
    single = [(i,) for i in range(numbers)]
    double = list(combinations(range(numbers), 2))
    yield from (((), which) for which in (*single, *double))
    yield from ((one, both) for both in double for one in single if one[0] in both)


def solved(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[int, int] | None:
    """Two whole factors with which every row adds up to its size."""
    (a, b), first = rows[0], sizes[0]
    for (c, d), second in zip(rows, sizes, strict=True):
        determinant = a * d - b * c
        if determinant:
            one = (first * d - b * second) // determinant
            other = (a * second - first * c) // determinant
            added_up = [one * left + other * right for left, right in rows]
            return (one, other) if added_up == list(sizes) else None
    return None
