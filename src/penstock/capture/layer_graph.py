"""A captured model: layers in execution order, the tensors between them, and one stage of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from penstock.capture.lengths import Length, LengthsOf, SizeOfLengths

__all__ = [
    "Batch",
    "LayerGraph",
    "Loss",
    "LossFunction",
    "OutputLayout",
    "ParameterUse",
    "StageProgram",
    "TensorSpec",
]

Batch = Any
"""A tensor, or a tuple, list or dict of tensors: one batch as the user's loader yields it."""

LossFunction = Callable[..., torch.Tensor]
"""``loss(output, target)`` for batches ``(*inputs, target)``; ``loss(output, batch)`` for dicts."""

Loss = LossFunction | Sequence[tuple[float, LossFunction]]
"""A loss function, or terms of a loss with their factors: ``[(1.0, words), (0.5, order)]``."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that crosses from one layer to another (or enters with the batch).

    ``shape`` is that of the example batch. Where ``batch_dim`` is a dimension, it has
    ``rows_per_sample`` rows for every sample (more than one where batch and sequence were
    flattened together, sample after sample). ``batch_dim`` is -1 for a tensor without samples in
    it, equal for all replicas (position bias, masks); ``reduced`` is true where such a tensor was
    nevertheless computed *from* samples (a mean over the batch), so that replicas disagree on it;
    also for a tensor with a ``batch_dim`` whose rows are not sample after sample (words before
    samples, flattened together). Rows of a ``reduced`` tensor cannot be cut between replicas.

    Where sizes depend on the lengths of a batch, ``varying`` says how by dimension, and
    ``varying_rows`` does for the rows per sample; `at` gives the spec for certain lengths.
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
        """Whether the number of samples can be told from the shape alone."""
        return self.batch_dim >= 0 and self.varying_rows is None

    def at(self, lengths: LengthsOf) -> "TensorSpec":
        """The spec for batches of these lengths; the same where none matters."""
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

    def bytes_for(self, samples: int) -> int:
        """The bytes of the tensor for ``samples`` samples."""
        count = 1
        for size in self.shape_for(samples):
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterUse:
    """A parameter or buffer by its first name in the model, and the layers that read it."""

    name: str
    layers: tuple[int, ...]
    bytes: int
    requires_grad: bool
    is_buffer: bool = False


@dataclass(frozen=True)
class StageProgram:
    """The layers ``[lo, hi)`` as one module.

    ``module(*batch_leaves, *received)`` takes the leaves of the (sliced) batch at the indices
    ``batch_inputs``, then the tensors named by ``received``, and returns a tuple of the tensors
    named by ``sent``. The last stage returns ``(loss, weight)`` after those: the mean loss of its
    slice, and the number of terms the mean is over as a 0-dim float tensor (rows, or valid targets
    where the loss ignores some), so that slices can be weighted exactly. At the very end come the
    outputs of the model with the numbers ``outputs``. Parameters and buffers keep the names of the
    user's model.
    """

    layers: range
    module: nn.Module
    batch_inputs: tuple[int, ...]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    is_last: bool
    outputs: tuple[int, ...] = ()


class OutputLayout(Protocol):
    """What the model returns before the loss is taken of it.

    ``specs`` describe its tensors, in a fixed order; the loss itself is none of them. Where they
    cannot be had, ``problem`` says why.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, in order."""
        ...

    @property
    def problem(self) -> str:
        """Why they cannot be had; empty where they can."""
        ...

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's result around ``tensors``, with ``None`` in the place of the loss."""
        ...


class LayerGraph(Protocol):
    """A layer graph: what planning, measuring and running need of a captured model."""

    @property
    def name(self) -> str:
        """A name for people: the class of the model."""
        ...

    @property
    def model(self) -> nn.Module:
        """What was captured."""
        ...

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Distinct names of the layers, in order of execution."""
        ...

    @property
    def mixing(self) -> str:
        """Why micro-batches cannot give what the whole batch gives; empty where they do."""
        ...

    def own_module(self) -> nn.Module:
        """The user's model with its loss: ``forward(*leaves)`` returns the loss first.

        Tensors of the model have ``model.`` before their names, those of the loss ``loss.``.
        """
        ...

    @property
    def batch_size(self) -> int:
        """Samples in the example batch."""
        ...

    @property
    def parameter_uses(self) -> tuple[ParameterUse, ...]:
        """Every parameter and buffer with the layers that read it."""
        ...

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Further names of tied parameters, each with the first name of the same parameter."""
        ...

    @property
    def crossings(self) -> tuple[tuple[TensorSpec, int, tuple[int, ...]], ...]:
        """Tensors read by later layers: the tensor, its producer layer, its consumer layers."""
        ...

    def batch_leaves(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in a fixed order, samples along dimension 0.

        Raises:
            BadInput: structure, dtype or a dimension other than the batch differ from the example.
        """
        ...

    def as_one_step(self, batches: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The leaves of batches that make one step together.

        What slices must know of the whole step is then that of all of them; `batch_leaves` has it
        for a step of one batch.
        """
        ...

    def as_own_steps(
        self, leaves: Sequence[torch.Tensor], cut: Sequence[range]
    ) -> list[torch.Tensor]:
        """The leaves of a batch whose micro-batches, these rows of it, are each a step alone."""
        ...

    @property
    def lengths(self) -> tuple[Length, ...]:
        """The lengths that vary from batch to batch, as declared."""
        ...

    @property
    def largest_lengths(self) -> LengthsOf:
        """The largest of each length that is declared, or else that of the example batch."""
        ...

    def lengths_of(self, leaves: Mapping[int, torch.Tensor]) -> LengthsOf:
        """The lengths of a batch, given by its leaves; that of a leaf left out is the example's.

        Raises:
            BadInput: the model as captured has no such length.
        """
        ...

    def stage(self, layers: range) -> StageProgram:
        """One module of the layers ``layers``, sharing the captured model's parameters."""
        ...

    @property
    def outputs(self) -> OutputLayout:
        """What the model returns, for predictions and metrics."""
        ...

    @property
    def output_layers(self) -> tuple[int, ...]:
        """The layer whose stage returns each output; empty where none are wanted."""
        ...

    @property
    def leaves_read(self) -> frozenset[int]:
        """The leaves of a batch that its stages read."""
        ...

    def targets(self, leaves: Mapping[int, torch.Tensor]) -> Batch:
        """What a loss function gets besides the output; the batch where the model has its own."""
        ...

    def known_leaves(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The leaves of a batch that may lack those that `leaves_read` does not name.

        Raises:
            BadInput: as `batch_leaves`, or a leaf that is read is missing.
        """
        ...

    def with_outputs(self) -> "LayerGraph":
        """The same layers, whose last stage returns the model's outputs after loss and weight.

        Raises:
            BadInput: the outputs cannot be had.
        """
        ...

    def without_loss(self) -> "LayerGraph":
        """The same layers without the loss; each stage returns the outputs that it makes.

        Raises:
            BadInput: the outputs cannot be had.
        """
        ...
