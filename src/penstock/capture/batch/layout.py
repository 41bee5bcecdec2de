"""The structure of a batch: where its tensors are, and what later batches must look like."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from penstock.capture.batch.lengths import (
    Dynamic,
    Length,
    LengthPlaces,
    LengthsOf,
    named_lengths,
)
from penstock.capture.batch.part import Leaf, LeafKey
from penstock.capture.batch.unread import UnreadEntry
from penstock.capture.contract import Batch
from penstock.errors import BadInput
from penstock.torch_internals import pytree

RowsOf: TypeAlias = Mapping[LeafKey, int]
"""The rows that each sample has of a tensor, by its key in the batch; 0: all samples share it."""

_CAPTURE_AGAIN = "or capture such a batch, too (other_examples=[batch])"


@dataclass(frozen=True)
class LeafSpec:
    """One tensor of the example batch; ``name`` is how a user reaches it, as in ``batch["x"]``.

    ``varying`` are the dimensions that vary from batch to batch, each with the index of its length.
    Each sample has ``rows`` consecutive rows of dimension 0. With 0 all samples share the tensor,
    which then has a dimension of samples in front (in ``shape``, too), along which its memory
    repeats.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: tuple[tuple[int, int], ...] = ()
    rows: int = 1

    @property
    def in_front(self) -> int:
        """The dimensions in front of those that the user knows."""
        return int(self.rows == 0)

    def by_sample(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        """The tensor with samples as dimension 0, for samples that have several rows, or share."""
        if self.rows == 0:
            return tensor.expand(samples, *tensor.shape)
        return tensor if self.rows == 1 else tensor.unflatten(0, (-1, self.rows))

    def as_given(self, leaf: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_sample`."""
        if self.rows == 0:
            return leaf[0]
        return leaf if self.rows == 1 else leaf.flatten(0, 1)


@dataclass(frozen=True)
class BatchLayout:
    """The structure of the example batch, its tensors in a fixed order, and its sample count.

    ``structure`` has a `Slot` for each tensor, and an `UnreadEntry` for what has no tensors and is
    not read. Whatever else is no tensor (None, a flag, a number that is read) is a constant that
    later batches must repeat. ``lengths`` are the sizes that may differ in later batches.

    The tensors that `flatten` and `indexed` return, and that `rebuild` takes, have samples as
    dimension 0. For example, a tensor ``(64, 8)`` with 16 rows for each sample in a batch of 4
    becomes ``(4, 16, 8)``, and one that all samples share ``(4, 64, 8)``.
    """

    structure: Any
    leaves: tuple[LeafSpec, ...]
    batch_size: int
    lengths: tuple[Length, ...] = ()

    @cached_property
    def length_places(self) -> LengthPlaces:
        """Places of each length: leaf and dimension."""
        return tuple(
            tuple(
                (leaf, dim)
                for leaf, spec in enumerate(self.leaves)
                for dim, length in spec.varying
                if length == number
            )
            for number in range(len(self.lengths))
        )

    @property
    def shared(self) -> frozenset[int]:
        """The tensors that all samples share."""
        return frozenset(index for index, leaf in enumerate(self.leaves) if not leaf.rows)

    @property
    def example_lengths(self) -> LengthsOf:
        """The lengths of the example batch."""
        return tuple(self.leaves[leaf].shape[dim] for (leaf, dim), *_ in self.length_places)

    def lengths_of(self, found: Mapping[int, Leaf]) -> LengthsOf:
        """The lengths of a batch; those without a tensor in ``found`` are the example's."""
        if not self.lengths:
            return ()
        return tuple(
            next((found[leaf].shape[dim] for leaf, dim in places if leaf in found), example)
            for places, example in zip(self.length_places, self.example_lengths, strict=True)
        )

    def flatten(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in order, with samples first, checked against the example."""
        return list(self.indexed(batch).values())

    def indexed(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The tensors of ``batch`` by index, for the layout of a `part`; checked likewise."""
        given = zip(_paths(self.structure), _match(self.structure, batch, "batch"), strict=True)
        own = {index: (self.leaves[index], tensor) for (index, _), tensor in given}
        cut = [(spec, tensor) for spec, tensor in own.values() if spec.rows]
        for spec, tensor in cut:
            check_leaf(spec, tensor)
        _check_rows([(spec, tensor.shape[0]) for spec, tensor in cut])
        samples = cut[0][1].shape[0] // cut[0][0].rows if cut else 1
        found = {i: spec.by_sample(tensor, samples) for i, (spec, tensor) in own.items()}
        for i, (spec, _) in own.items():
            if not spec.rows:
                check_leaf(spec, found[i])
        for length, places in zip(self.lengths, self.length_places, strict=True):
            sizes = {
                self.place(leaf, dim): found[leaf].shape[dim]
                for leaf, dim in places
                if leaf in found
            }
            check_length(length, sizes)
        return found

    def place(self, leaf: int, dim: int) -> str:
        """A dimension in words."""
        spec = self.leaves[leaf]
        return f"dimension {dim - spec.in_front} of {spec.name}"

    @cached_property
    def rebuild(self) -> Callable[[Mapping[int, torch.Tensor]], Batch]:
        """A function that fills the batch's structure with leaves, which are given by index.

        It is made once, since it is called for every micro-batch. Additional leaves of a step
        (`penstock.capture.loss.step_values`) are ignored.
        """

        def getter(index: int) -> Callable[[Mapping[int, torch.Tensor]], torch.Tensor]:
            leaf = self.leaves[index]
            if leaf.rows == 1:
                return itemgetter(index)
            return lambda given: leaf.as_given(given[index])

        return filling(self.structure, getter)

    def part(self, *keys: str | int) -> "BatchLayout":
        """The layout of the entries ``keys`` of a tuple or dict batch; indices stay the same."""
        if isinstance(self.structure, Mapping):
            return replace(self, structure={key: self.structure[key] for key in keys})
        return replace(self, structure=tuple(self.structure[key] for key in keys))

    @property
    def paths(self) -> tuple[tuple[str | int, ...], ...]:
        """The keys by which a user reaches each tensor; empty if the batch is itself a tensor."""
        return tuple(path for _, path in sorted(_paths(self.structure)))

    @property
    def indices(self) -> tuple[int, ...]:
        """The leaves that occur in the structure."""
        return tuple(sorted(index for index, _ in _paths(self.structure)))

    @property
    def unread(self) -> tuple[UnreadEntry, ...]:
        """The entries without tensors that the program must not read."""
        entries = pytree.tree_leaves(self.structure)
        return tuple(entry for entry in entries if isinstance(entry, UnreadEntry))

    def with_constants(self, read: Sequence[UnreadEntry]) -> "BatchLayout":
        """The layout in which these entries are constants."""

        def constant(entry: Any) -> Any:
            return entry.value if isinstance(entry, UnreadEntry) and entry in read else entry

        return replace(self, structure=pytree.tree_map(constant, self.structure))


def layout_of(
    batch: Batch, dynamic: Dynamic | None = None, rows: RowsOf | None = None
) -> BatchLayout:
    """The likeliest of `layouts_of`."""
    return layouts_of(batch, dynamic, rows)[0]


def layouts_of(
    batch: Batch, dynamic: Dynamic | None = None, rows: RowsOf | None = None
) -> list[BatchLayout]:
    """The layouts that an example batch may have; the dimensions that ``dynamic`` names may vary.

    ``rows`` says how many rows of a tensor each sample has. Otherwise the samples are the commonest
    size of dimension 0 (the first such), and tensors of this size have one row for each. A tensor
    with a multiple has several rows for each, or all samples share it; any other is shared. Or the
    least size divides all others, and nothing is shared. Layouts that share little come first.
    """
    leaves: list[tuple[str, torch.Tensor]] = []
    structure = _structure(batch, "batch", leaves)
    if not leaves:
        raise BadInput(
            f"the example batch, a {type(batch).__name__}, has no tensors in tuples, lists or "
            f"dicts; pass one batch as your loader yields it, and let its collate function yield "
            f"those"
        )
    specs = tuple(LeafSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in leaves)
    for name, tensor in leaves:
        if tensor.layout != torch.strided:
            raise BadInput(
                f"{name} has the layout {tensor.layout}, of which no samples can be sliced; "
                f"pass it dense (to_dense()), or padded with a mask (to_padded_tensor())"
            )
    given = _rows_given(BatchLayout(structure, specs, 0), rows or {})
    found: list[BatchLayout] = []
    problem: BadInput | None = None
    for samples, counts in _readings(specs, given):
        own = tuple(
            replace(spec, rows=count, shape=spec.shape if count else (samples, *spec.shape))
            for spec, count in zip(specs, counts, strict=True)
        )
        layout = BatchLayout(structure, own, samples)
        try:
            layout = with_lengths(layout, dynamic) if dynamic else layout
            layout.flatten(batch)
            found.append(layout)
        except BadInput as other:
            problem = problem or other
    if not found and problem is not None:
        raise problem
    return found


def _rows_given(layout: BatchLayout, rows: RowsOf) -> dict[int, int]:
    """The rows of a sample that ``rows`` gives, by leaf; `BadInput` unless samples are whole."""
    given = {_leaf_at(layout, key, "rows"): count for key, count in rows.items()}
    for index, count in given.items():
        leaf = layout.leaves[index]
        size = leaf.shape[0] if leaf.shape else 1
        if type(count) is not int or count < 0 or (count and (size % count or not leaf.shape)):
            raise BadInput(
                f"rows gives {leaf.name} {count!r} rows for each sample, but it has "
                f"{size} in the example batch; give a whole number that divides them, or 0 if all "
                f"samples share it"
            )
    return given


def _readings(
    specs: Sequence[LeafSpec], given: Mapping[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Samples, and the rows of each tensor for a sample, as they may be; see `layouts_of`."""
    said = [specs[i].shape[0] // count for i, count in given.items() if count]
    sizes = [spec.shape[0] for i, spec in enumerate(specs) if spec.shape and i not in given]
    found: list[tuple[int, tuple[int, ...]]] = []
    commonest = [max(sizes, key=sizes.count)] if sizes else []
    for samples in said[:1] or commonest:
        options = [
            (given[i],) if i in given else _rows_that_may_be(spec, samples)
            for i, spec in enumerate(specs)
        ]
        open_ones = [spec.name for spec, own in zip(specs, options, strict=True) if len(own) > 1]
        if len(open_ones) > _MOST_OPEN:
            raise BadInput(
                f"{', '.join(open_ones)} have several rows for each of {samples} samples, or all "
                f"samples share them, and at most {_MOST_OPEN} can be tried; say it with rows=..."
            )
        found += [(samples, counts) for counts in product(*options)]
    least = min(sizes, default=1)
    if least > 1 and not said and not any(size % least for size in sizes):
        counts = [
            given.get(i, spec.shape[0] // least) if spec.shape else 0
            for i, spec in enumerate(specs)
        ]
        found = list(dict.fromkeys([(least, tuple(counts)), *found]))
    if not found:
        raise BadInput(
            f"no tensor of the batch ({', '.join(spec.name for spec in specs)}) has samples along "
            f"dimension 0; give it at least one that is not shared by all of them"
        )
    return sorted(found, key=lambda reading: reading[1].count(0))


_MOST_OPEN = 3
"""Limit of tensors that may be shared; each doubles the number of trials."""


def _rows_that_may_be(spec: LeafSpec, samples: int) -> tuple[int, ...]:
    size = spec.shape[0] if spec.shape else 0
    if size == samples:
        return (1,)
    return (size // samples, 0) if samples and size and not size % samples else (0,)


def with_lengths(layout: BatchLayout, dynamic: Dynamic) -> BatchLayout:
    """``layout`` with the dimensions that vary."""
    lengths = named_lengths(dynamic)
    numbers = {length.name: number for number, length in enumerate(lengths)}
    leaves = list(layout.leaves)
    for key, dimensions in dynamic.items():
        index = _leaf_at(layout, key, "dynamic")
        leaf = leaves[index]
        varying: list[tuple[int, int]] = []
        for dim, named in dimensions.items():
            name = named.name if isinstance(named, Length) else named
            varying.append((_checked_dimension(leaf, dim + leaf.in_front), numbers[name]))
        leaves[index] = replace(leaf, varying=tuple(varying))
    return replace(layout, leaves=tuple(leaves), lengths=lengths)


def entry_at(batch: Any, key: LeafKey) -> Any:
    """Return the entry of a batch, or of its structure, at ``key``; None if there is nothing."""
    for step in key if isinstance(key, tuple) else (key,):
        try:
            batch = batch[step]
        except (KeyError, IndexError, TypeError):
            return None
    return batch


def key_in_batch(path: tuple[str | int, ...]) -> LeafKey:
    """The key of a tensor as users write it: without a tuple unless it is nested."""
    return path[0] if len(path) == 1 else path


def _leaf_at(layout: BatchLayout, key: LeafKey, argument: str) -> int:
    """The index of the tensor that a user reaches by ``key``, as he gave it in ``argument``."""
    entry = entry_at(layout.structure, key)
    if isinstance(entry, Slot):
        return entry.index
    names = ", ".join(leaf.name for leaf in layout.leaves)
    raise BadInput(
        f"{argument} names {key!r}, but the batch has no tensor there; its tensors are {names}"
    )


def _checked_dimension(leaf: LeafSpec, dim: int) -> int:
    """``dim`` itself, if this dimension may be declared to vary; else raise `BadInput`."""
    if leaf.rows > 1:
        raise BadInput(
            f"dynamic names a dimension of {leaf.name}, which has {leaf.rows} rows for each "
            "sample; only tensors with one row for each may vary otherwise, so pad this one"
        )
    if dim == 0:
        raise BadInput(
            f"dynamic names dimension 0 of {leaf.name}, which is the samples and may always vary; "
            "leave it out"
        )
    if not 0 < dim < len(leaf.shape):
        raise BadInput(
            f"dynamic names dimension {dim - leaf.in_front} of {leaf.name}, which has shape "
            f"{leaf.shape[leaf.in_front :]}; name one from {1 - leaf.in_front} to "
            f"{len(leaf.shape) - 1 - leaf.in_front}"
        )
    if leaf.shape[dim] < 2:
        raise BadInput(
            f"dimension {dim - leaf.in_front} of {leaf.name} is declared to vary, but is "
            f"{leaf.shape[dim]} in the example batch, and sizes below 2 look like "
            f"constants; give a longer example"
        )
    return dim


def _structure(value: Any, name: str, leaves: list[tuple[str, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        leaves.append((name, value))
        return Slot(len(leaves) - 1)
    before, found = len(leaves), value
    if isinstance(value, Mapping):
        found = {k: _structure(v, f"{name}[{k!r}]", leaves) for k, v in value.items()}
    elif isinstance(value, list | tuple):
        entries = [_structure(v, f"{name}[{i}]", leaves) for i, v in enumerate(value)]
        found = in_sequence_of(value, entries)
    if len(leaves) > before or value is None or isinstance(value, bool):
        return found
    return UnreadEntry(name, value)


def _match(structure: Any, value: Any, name: str) -> Iterator[torch.Tensor]:
    """The tensors of ``value`` at the slots of ``structure``."""
    if isinstance(structure, Slot):
        if not isinstance(value, torch.Tensor):
            raise _mismatch(name, f"a {type(value).__name__}", "a tensor")
        yield value
    elif isinstance(structure, Mapping):
        if not isinstance(value, Mapping):
            raise _mismatch(name, f"a {type(value).__name__}", f"a dict of {sorted(structure)}")
        if set(value) != set(structure):
            raise _mismatch(name, f"a dict of {sorted(value)}", f"a dict of {sorted(structure)}")
        for key, entry in structure.items():
            yield from _match(entry, value[key], f"{name}[{key!r}]")
    elif isinstance(structure, list | tuple):
        if not isinstance(value, list | tuple):
            raise _mismatch(name, f"a {type(value).__name__}", f"{len(structure)} entries")
        if len(value) != len(structure):
            raise _mismatch(name, f"{len(value)} entries", f"{len(structure)} entries")
        for i, entry in enumerate(structure):
            yield from _match(entry, value[i], f"{name}[{i}]")
    elif isinstance(structure, UnreadEntry):
        if isinstance(value, torch.Tensor):
            raise _mismatch(name, "a tensor", "none")
    elif isinstance(value, torch.Tensor) or value != structure:
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise BadInput(
            f"{name} is {shown}, but was {structure!r} at capture, where whatever is no tensor is "
            f"constant; leave it out of the batch if the model does not read it, {_CAPTURE_AGAIN}"
        )


def _mismatch(name: str, found: str, expected: str) -> BadInput:
    return BadInput(
        f"{name} is {found}, but was {expected} at capture; pass that, {_CAPTURE_AGAIN}"
    )


def check_leaf(leaf: LeafSpec, tensor: torch.Tensor) -> None:
    """Raise `BadInput` if a tensor has another type or other sizes than ``leaf``, but for rows."""
    if tensor.dtype != leaf.dtype:
        raise _mismatch(leaf.name, f"of {tensor.dtype}", f"of {leaf.dtype}")
    front = leaf.in_front
    shape, known = tuple(tensor.shape)[front:], leaf.shape[front:]
    if len(shape) != len(known):
        raise BadInput(
            f"{leaf.name} has shape {shape}, but had {len(known)} dimensions at capture, "
            f"{known}; reshape it, {_CAPTURE_AGAIN}"
        )
    for dim, (found, expected) in enumerate(zip(shape, known, strict=True)):
        if dim + front == 0 or any(dim + front == varying for varying, _ in leaf.varying):
            continue
        if found != expected:
            raise BadInput(
                f"{leaf.name} has shape {shape}: dimension {dim} is {found}, but was {expected} "
                f"at capture; pad or trim it to {expected}, declare it dynamic, {_CAPTURE_AGAIN}"
            )


def check_length(length: Length, sizes: Mapping[str, int]) -> None:
    """Raise `BadInput` if a length differs between its tensors or is out of range."""
    if len(set(sizes.values())) > 1:
        unequal = ", ".join(f"{place} is {size}" for place, size in sizes.items())
        raise BadInput(
            f"'{length.name}' is declared to be one length, but {unequal}; pad all to one length, "
            "or give the dimensions names of their own"
        )
    for place, size in sizes.items():
        if size < length.min or (length.max is not None and size > length.max):
            limit = f"at most {length.max}" if size > length.min else f"at least {length.min}"
            raise BadInput(
                f"{place} is {size}, but '{length.name}' is declared to be {limit}; trim or pad "
                "the batch, or declare another range"
            )


def _check_rows(found: Sequence[tuple[LeafSpec, int]]) -> None:
    """Raise `BadInput` unless all tensors have rows for the same number of samples."""
    if len({Fraction(rows, leaf.rows) for leaf, rows in found}) > 1:
        counts = ", ".join(
            f"{leaf.name} {rows}" + (f" of {leaf.rows} a sample" if leaf.rows > 1 else "")
            for leaf, rows in found
        )
        raise BadInput(
            f"the tensors of the batch have unequal numbers of samples ({counts}); dimension 0 of "
            "each must be the batch, with as many rows for every sample; say how many a tensor has "
            "with rows=... (0: all samples share it), or give an example batch of two samples or "
            "more"
        )
    for leaf, rows in found:
        if rows % leaf.rows:
            raise _mismatch(leaf.name, f"of {rows} rows", f"of {leaf.rows} rows for each sample")
    if any(rows == 0 for _, rows in found):
        raise BadInput("the batch has 0 samples, at least 1 is needed; skip empty batches")


def _paths(structure: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[int, Any]]:
    """The index of every tensor, with the keys that lead to it."""
    if isinstance(structure, Slot):
        yield structure.index, path
    elif isinstance(structure, Mapping | list | tuple):
        items = structure.items() if isinstance(structure, Mapping) else enumerate(structure)
        for key, entry in items:
            yield from _paths(entry, (*path, key))


@dataclass(frozen=True)
class Slot:
    """The place of tensor ``index`` in a structure."""

    index: int


@dataclass(frozen=True)
class KeyedSlots:
    """A mapping class that is constructed from its entries, as Hugging Face models return."""

    kind: type
    entries: Mapping[str, Any]


def filling(structure: Any, getter: Callable[[int], Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """A function of tensors that fills each slot of a structure by ``getter(index)``.

    Entries of a batch that are not read become placeholders; constants stay.
    """
    if isinstance(structure, Slot):
        return getter(structure.index)
    if isinstance(structure, KeyedSlots):
        entries = filling(structure.entries, getter)
        return entries if structure.kind is dict else lambda given: structure.kind(**entries(given))
    if isinstance(structure, Mapping):
        named = {key: filling(entry, getter) for key, entry in structure.items()}
        return lambda given: {key: fill(given) for key, fill in named.items()}
    if isinstance(structure, list | tuple):
        listed = [filling(entry, getter) for entry in structure]
        return lambda given: in_sequence_of(structure, [fill(given) for fill in listed])
    constant = structure.stand_in if isinstance(structure, UnreadEntry) else structure
    return lambda _: constant


def in_sequence_of(value: Sequence[Any], entries: Sequence[Any]) -> Any:
    """``entries`` in the sequence type of ``value`` (a named tuple keeps its type)."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*entries)
    return list(entries) if isinstance(value, list) else tuple(entries)
