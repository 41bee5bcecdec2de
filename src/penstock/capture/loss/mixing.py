"""Find calls between modules in which samples act on one another, which micro-batches cannot do.

    x.softmax(0), x.flip(0)         act along the samples
    x[1:], x[order]                 take samples by their places
    x @ x.t(), torch.cdist(x, x)    compare samples with each other
    x - x.mean(0)                   take a statistic of the samples' activations
    model(x / x.max())              the same of the batch, before a module

Then a pipeline gives the gradients of gradient accumulation, not those of the whole batch. A sum
over samples mixes nothing if it is only added up, and a number of the batch that only the loss
reads is that of the whole step (`penstock.capture.loss.loss_parts`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from penstock.capture.loss.loss_parts import ARITHMETIC, value_in, varies
from penstock.capture.record.calls import (
    ProgramRecord,
    RecordedCall,
    TensorReference,
)
from penstock.capture.record.sizes import BatchSize, Formula, ValueSizes
from penstock.capture.record.user_lines import line_in_words
from penstock.torch_internals import pytree

_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax"), 1),
    **dict.fromkeys(("cummin", "logcumsumexp", "flip", "gather", "index_select"), 1),
    **dict.fromkeys(("normalize", "roll", "diff"), 2),
    **{"layer_norm": 9, "unique": 9, "sort": 1, "argsort": 1, "topk": 2, "fliplr": 9, "flipud": 9},
}
"""Calls along a dimension, with the position of that argument."""

_PARTS = frozenset(
    [
        *("unbind", "split", "split_with_sizes", "chunk", "tensor_split", "select", "narrow"),
        *("__getitem__", "index_select"),
    ]
)
"""Calls that take some samples of several, in most code to work on each by itself."""


def mixing_call(
    record: ProgramRecord, others: Sequence[ProgramRecord], sizes: ValueSizes, loss: int
) -> str:
    """The first such call on the way to the value ``loss``, in words; empty if there is none.

    ``others`` are recordings of other samples: a number that differs there is of the batch.
    """
    for _, event, found in _Search(record, others, sizes, loss):
        if found:
            return f"{found} at {line_in_words(event.line)}"
    return ""


def start_of_whole_loss(
    record: ProgramRecord, others: Sequence[ProgramRecord], sizes: ValueSizes, loss: int
) -> int | None:
    """The first call of the loss function in which samples meet: it mixes them, or adds them up.

    None where samples act on one another in the model already.
    """

    def has_samples(values: Sequence[int]) -> bool:
        return any(sizes.has_samples(value) for value in values)

    for number, event, found in _Search(record, others, sizes, loss):
        if number < record.model_end:
            if found:
                return None
        elif event.depends and (
            found or (has_samples(event.reads) and not has_samples(event.makes))
        ):
            return number
    return None


class _Search:
    """A walk over the calls on the way to the value ``loss``, in order.

    ``statistics`` are values without samples that are made of several samples' activations, and
    ``counts`` of several samples of the batch alone. ``tainted`` have samples and are made of
    these. ``of_loss`` are the calls that no module follows.
    """

    def __init__(
        self, record: ProgramRecord, others: Sequence[ProgramRecord], sizes: ValueSizes, loss: int
    ) -> None:
        self.record, self.sizes = record, sizes
        self.statistics, self.counts, self.tainted = set[int](), set[int](), set[int]()
        self._others = [other.by_address for other in others]
        self._needed = record.behind([record.values[loss].maker])
        units = [number for number in self._needed if record.events[number].is_unit]
        self.of_loss = self._needed - record.behind(units)

    def __iter__(self) -> Iterator[tuple[int, RecordedCall, str]]:
        """The calls, each with what is mixed there, in words."""
        for number, event in enumerate(self.record.events):
            if number in self._needed and event.func is not torch.autograd.grad:
                made = [v for v in event.makes if self.record.values[v].maker == number]
                search = self.unit if event.is_unit else self.call
                yield number, event, search(number, event, made)

    def _samples(self, value: int) -> list[int]:
        """The dimensions of a value that are samples; of unknown sizes none is known to be."""
        formulas = self.sizes.formulas[value] or ()
        return [dim for dim, size in enumerate(formulas) if size.has_samples]

    def unit(self, _: int, event: RecordedCall, made: Sequence[int]) -> str:
        """A call of a module: its result has samples, or is made of statistics alone."""
        if any(map(self._samples, made)):
            if any(value in self.tainted for value in event.reads):
                return f"'{event.address[0]}' is given a statistic of the samples"
            if any(value in self.statistics for value in event.reads):
                return f"'{event.address[0]}' is given a statistic of the samples' activations"
        elif any(v in self.statistics or self._are_activations(v) for v in event.reads):
            self.statistics.update(v for v in made if self.record.values[v].of_batch)
        return ""

    def _are_activations(self, value: int) -> bool:
        return value in self.record.dependent and bool(self._samples(value))

    def call(self, number: int, event: RecordedCall, made: Sequence[int]) -> str:
        """A call between modules."""
        name, reads = str(event.address[1]), event.reads
        rows = [value for value in reads if self._samples(value)]
        counts = event.depends or number in self.of_loss
        if counts and self._is_along_samples(name, event):
            return f"'{name}' along the samples"
        if number in self.of_loss and name == "__getitem__" and self._takes_by_place(event):
            return "an index takes samples by their places"
        for value in made:
            dims = self._samples(value)
            if counts and rows and len(dims) > max(1, *(len(self._samples(v)) for v in rows)):
                return f"'{name}' compares samples with each other"
            if not dims:
                own = self.statistics if event.depends else self.counts
                takes_part = name in _PARTS
                if (rows and not takes_part) or any(
                    v in self.statistics or v in self.counts for v in reads
                ):
                    own.add(value)
            elif event.depends and any(v in self.statistics for v in reads):
                return f"'{name}' takes a statistic of the samples' activations"
            elif any(v in self.tainted for v in reads) or self._counts_in(name, event):
                self.tainted.add(value)
        return ""

    def _is_along_samples(self, name: str, event: RecordedCall) -> bool:
        place = _ALONG.get(name)
        if place is None or not event.args or not event.args[0]:
            return False
        args, kwargs = event.args
        first = args[0]
        if value_in(first) < 0:
            return False
        count, samples = len(first.shape), self._samples(value_in(first))
        if name == "layer_norm":
            return any(dim >= count - len(args[1]) for dim in samples)
        if name == "unique" and "dim" not in kwargs:
            return bool(samples)
        given = kwargs.get("dim", kwargs.get("dims", args[place:] if name == "flip" else None))
        if given is None:
            given = args[place] if len(args) > place else {"flipud": 0, "fliplr": 1}.get(name, -1)
        dims = [dim for dim in pytree.tree_leaves(given) if isinstance(dim, int)]
        return any(dim % count in samples for dim in dims if count)

    def _rows_of_a_sample(self, value: int, dim: int) -> int:
        """Return how many entries of a dimension are of one sample; 0 if that is unknown."""
        size = (self.sizes.formulas[value] or ())[dim]
        each = size.each_sample() if isinstance(size, Formula) else None
        return each.at(BatchSize(1)) if each is not None and each.is_constant else 0

    def _takes_by_place(self, event: RecordedCall) -> bool:
        """Return whether an index takes some samples only, or takes them in another order."""
        if event.args is None or value_in(event.args[0][0]) < 0:
            return False
        first, index = event.args[0][:2]
        entries = index if isinstance(index, tuple) else (index,)
        samples, dim = self._samples(first.value), 0
        for entry in entries:
            if entry is Ellipsis:
                dim = len(first.shape) - sum(map(dimensions, entries))
            elif isinstance(entry, slice) and dim in samples:
                size, rows = first.shape[dim], self._rows_of_a_sample(first.value, dim)
                start, stop, step = entry.indices(size)
                # The same row of each sample mixes nothing.
                by_sample = start < rows and (stop, step) == (size, rows)
                if (start, stop, step) != (0, size, 1) and not by_sample:
                    return True
            elif isinstance(entry, TensorReference) and dim in samples and self._picks(entry):
                return True
            dim += dimensions(entry)
        return False

    def _picks(self, index: TensorReference) -> bool:
        """Return whether an index is of numbers, and not made by ``arange`` of all samples."""
        if index.dtype == torch.bool or not isinstance(index.value, int):
            return False
        event = self.record.events[self.record.values[index.value].maker]
        return event.address[1] != "arange" or event.args is None or len(event.args[0]) != 1

    def _counts_in(self, name: str, event: RecordedCall) -> bool:
        """Return whether a call computes with a number or value of all samples of the batch."""
        if name not in ARITHMETIC or event.args is None:
            return False
        leaves = pytree.tree_leaves(event.args)
        return any(
            entry.value in self.counts
            if isinstance(entry, TensorReference)
            else varies(self._others, event, position, entry)
            for position, entry in enumerate(leaves)
        )


def dimensions(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index takes."""
    if isinstance(entry, TensorReference) and entry.dtype == torch.bool:
        return len(entry.shape)
    return int(entry is not None and entry is not Ellipsis)
