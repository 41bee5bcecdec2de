"""Batches and losses as users give them, and the tensors that cross between layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from penstock.capture.batch.lengths import LengthsOf, SizeOfLengths

Batch = Any
"""A tensor, or a tuple, list or dict of tensors: one batch as the user's loader yields it."""

LossFunction = Callable[..., torch.Tensor]
"""``loss(output, target)`` for batches ``(*inputs, target)``; ``loss(output, batch)`` for dicts."""

Loss = LossFunction | Sequence[tuple[float, LossFunction]]
"""A loss function, or weighted terms of a loss: ``[(1.0, words), (0.5, order)]``."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that crosses from one layer to another (or enters with the batch).

    ``shape`` is that of the example batch. If ``batch_dim`` is a dimension, it has
    ``rows_per_sample`` rows for every sample (more than one if batch and sequence were flattened
    together, sample after sample). ``batch_dim`` is -1 for a tensor that contains no samples, which
    is equal on all replicas (position bias, masks).

    ``reduced`` is true in two cases: the tensor contains no samples but was computed *from* samples
    (a mean over the batch), so that replicas have different values; or its rows are not sample
    after sample (words before samples, flattened together). Rows of a ``reduced`` tensor cannot be
    divided among replicas.

    If sizes depend on the lengths of a batch, ``varying`` has the formulas by dimension, and
    ``varying_rows`` the formula for the rows per sample. `at` gives the spec for given lengths.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int
    rows_per_sample: int = 1
    requires_grad: bool = False
    reduced: bool = False
    varying: tuple[tuple[int, SizeOfLengths], ...] = ()
    varying_rows: SizeOfLengths | None = None

    @property
    def has_plain_rows(self) -> bool:
        """Return whether the shape alone shows the number of samples."""
        return self.batch_dim >= 0 and self.varying_rows is None

    def at(self, lengths: LengthsOf) -> "TensorSpec":
        """The spec for batches of these lengths."""
        if not self.varying and self.varying_rows is None:
            return self
        shape = list(self.shape)
        for dim, formula in self.varying:
            shape[dim] = formula.at(lengths)
        rows = self.rows_per_sample if self.varying_rows is None else self.varying_rows.at(lengths)
        return replace(
            self, shape=tuple(shape), rows_per_sample=rows, varying=(), varying_rows=None
        )

    def shape_for(self, samples: int) -> tuple[int, ...]:
        """The shape for ``samples`` samples."""
        if self.batch_dim < 0:
            return self.shape
        rows = samples * self.rows_per_sample
        return (*self.shape[: self.batch_dim], rows, *self.shape[self.batch_dim + 1 :])

    def zeros(self, samples: int, lengths: LengthsOf, device: torch.device) -> torch.Tensor:
        """Zeros in the place of it, for ``samples`` samples of a batch of these lengths."""
        shape = self.at(lengths).shape_for(samples)
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def bytes_for(self, samples: int) -> int:
        """The bytes of the tensor for ``samples`` samples."""
        return prod(self.shape_for(samples)) * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterUse:
    """A parameter or buffer, by its first name in the model, and the layers that read it."""

    name: str
    layers: tuple[int, ...]
    bytes: int
    requires_grad: bool
    is_buffer: bool = False
