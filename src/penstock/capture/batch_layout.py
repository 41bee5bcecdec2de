"""The structure of a batch: where its tensors are, and what every later batch must look like."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.capture.layer_graph import Batch
from penstock.errors import BadInput

__all__ = ["BatchLayout", "LeafSpec", "layout_of"]

_CAPTURE_AGAIN = "or capture again with such a batch (build a new Pipeline)"


@dataclass(frozen=True)
class LeafSpec:
    """One tensor of the example batch; ``name`` is how a user reaches it, as in ``batch["x"]``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Slot:
    """The place of leaf ``index`` in the structure."""

    index: int


@dataclass(frozen=True)
class BatchLayout:
    """The structure of the example batch, its tensors in a fixed order, and its sample count.

    Anything in the batch that is not a tensor (None, a flag, a string) is a constant that later
    batches must repeat.
    """

    structure: Any
    leaves: tuple[LeafSpec, ...]
    batch_size: int

    def flatten(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in order, checked against the example.

        Raises:
            BadInput: structure, constants, dtype, or a dimension other than the batch differ, or
                the tensors disagree on the number of samples.
        """
        found = list(_match(self.structure, batch, "batch"))
        for leaf, tensor in zip(self.leaves, found, strict=True):
            _check_leaf(leaf, tensor)
        names = [leaf.name for leaf in self.leaves]
        _check_rows(list(zip(names, found, strict=True)))
        return found

    def indexed(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The tensors of ``batch`` by index, for the layout of a `part`; checked likewise."""
        found = list(_match(self.structure, batch, "batch"))
        order = list(_slots(self.structure))
        for index, tensor in zip(order, found, strict=True):
            _check_leaf(self.leaves[index], tensor)
        _check_rows([(self.leaves[i].name, t) for i, t in zip(order, found, strict=True)])
        return dict(zip(order, found, strict=True))

    def rebuild(self, leaves: Mapping[int, torch.Tensor]) -> Batch:
        """The batch's structure around ``leaves``, which are given by index."""
        return _rebuild(self.structure, leaves)

    def part(self, *keys: str | int) -> "BatchLayout":
        """The layout of the entries ``keys`` of a tuple or dict batch, indices as in the whole."""
        if isinstance(self.structure, Mapping):
            return BatchLayout(
                {key: self.structure[key] for key in keys}, self.leaves, self.batch_size
            )
        entries = tuple(self.structure[key] for key in keys)
        return BatchLayout(entries, self.leaves, self.batch_size)

    @property
    def indices(self) -> tuple[int, ...]:
        """The leaves that occur in the structure."""
        return tuple(sorted(_slots(self.structure)))


def layout_of(batch: Batch) -> BatchLayout:
    """The layout of an example batch.

    Raises:
        BadInput: no tensors, a tensor without a batch dimension, unequal numbers of samples, or an
            object that is neither tensor, tuple, list, dict nor plain constant.
    """
    leaves: list[torch.Tensor] = []
    names: list[str] = []
    structure = _structure(batch, "batch", leaves, names)
    if not leaves:
        raise BadInput("the example batch has no tensors; pass one batch as your loader yields it")
    specs = tuple(
        LeafSpec(name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in zip(names, leaves, strict=True)
    )
    for spec in specs:
        if not spec.shape:
            raise BadInput(
                f"{spec.name} is a 0-dimensional tensor, but dimension 0 of every tensor of a "
                "batch must be the samples; pass it as a plain number or expand it"
            )
    layout = BatchLayout(structure, specs, specs[0].shape[0])
    layout.flatten(batch)
    return layout


def _structure(value: Any, name: str, leaves: list[torch.Tensor], names: list[str]) -> Any:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        names.append(name)
        return _Slot(len(leaves) - 1)
    if isinstance(value, Mapping):
        return {k: _structure(v, f"{name}[{k!r}]", leaves, names) for k, v in value.items()}
    if isinstance(value, list | tuple):
        entries = [_structure(v, f"{name}[{i}]", leaves, names) for i, v in enumerate(value)]
        return _like(value, entries)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInput(
        f"{name} is a {type(value).__name__}, but a batch may hold tensors, tuples, lists, dicts "
        "and plain constants only; convert it in the loader's collate function"
    )


def _like(value: Sequence[Any], entries: Sequence[Any]) -> Any:
    """``entries`` in the sequence type of ``value`` (a named tuple keeps its type)."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*entries)
    return list(entries) if isinstance(value, list) else tuple(entries)


def _match(structure: Any, value: Any, name: str) -> Iterator[torch.Tensor]:
    """The tensors of ``value`` at the slots of ``structure``."""
    if isinstance(structure, _Slot):
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
    elif isinstance(value, torch.Tensor) or value != structure:
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise _mismatch(name, shown, repr(structure))


def _mismatch(name: str, found: str, expected: str) -> BadInput:
    return BadInput(
        f"{name} is {found}, but was {expected} at capture; pass that, {_CAPTURE_AGAIN}"
    )


def _check_leaf(leaf: LeafSpec, tensor: torch.Tensor) -> None:
    if tensor.dtype != leaf.dtype:
        raise _mismatch(leaf.name, f"of {tensor.dtype}", f"of {leaf.dtype}")
    shape = tuple(tensor.shape)
    if len(shape) != len(leaf.shape):
        raise BadInput(
            f"{leaf.name} has shape {shape}, but had {len(leaf.shape)} dimensions at capture, "
            f"{leaf.shape}; reshape it, {_CAPTURE_AGAIN}"
        )
    for dim, (found, expected) in enumerate(zip(shape[1:], leaf.shape[1:], strict=True), start=1):
        if found != expected:
            raise BadInput(
                f"{leaf.name} has shape {shape}: dimension {dim} is {found}, but was {expected} "
                f"at capture; pad or trim it to {expected}, {_CAPTURE_AGAIN}"
            )


def _check_rows(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    rows = {tensor.shape[0] for _, tensor in named}
    if len(rows) > 1:
        counts = ", ".join(f"{name} {tensor.shape[0]}" for name, tensor in named)
        raise BadInput(
            f"the tensors of the batch have unequal numbers of samples ({counts}); "
            "dimension 0 of each must be the batch"
        )
    if 0 in rows:
        raise BadInput("the batch has 0 samples, at least 1 is needed; skip empty batches")


def _rebuild(structure: Any, leaves: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(structure, _Slot):
        return leaves[structure.index]
    if isinstance(structure, Mapping):
        return {key: _rebuild(entry, leaves) for key, entry in structure.items()}
    if isinstance(structure, list | tuple):
        return _like(structure, [_rebuild(entry, leaves) for entry in structure])
    return structure


def _slots(structure: Any) -> Iterator[int]:
    if isinstance(structure, _Slot):
        yield structure.index
    elif isinstance(structure, Mapping):
        for entry in structure.values():
            yield from _slots(entry)
    elif isinstance(structure, list | tuple):
        for entry in structure:
            yield from _slots(entry)
