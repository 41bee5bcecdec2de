"""The layer graph: a captured model as layers in execution order, with the tensors between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from penstock.capture.batch_part import AnyLeaf, Leaf, PartialLeaf
from penstock.capture.lengths import Length, LengthsOf, SizeOfLengths

if TYPE_CHECKING:
    from penstock.capture.loss_module import BatchCall

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
        """Whether the shape alone shows the number of samples."""
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

    def bytes_for(self, samples: int) -> int:
        """The bytes of the tensor for ``samples`` samples."""
        count = 1
        for size in self.shape_for(samples):
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterUse:
    """A parameter or buffer, by its first name in the model, and the layers that read it."""

    name: str
    layers: tuple[int, ...]
    bytes: int
    requires_grad: bool
    is_buffer: bool = False


@dataclass(frozen=True)
class StageProgram:
    """The layers ``[lo, hi)`` as one module.

    ``module(*batch_leaves, *received)`` takes the leaves of the (sliced) batch with the indices
    ``batch_inputs``, then the tensors that ``received`` describes. It returns a tuple of the
    tensors that ``sent`` describes. The last stage also returns ``(loss, weight)``: the mean loss
    of its slice, and the number of terms of that mean as a 0-dim float tensor (rows, or valid
    targets if the loss ignores some), so that slices can be weighted exactly. Last come the model's
    outputs with the indices ``outputs``. Parameters and buffers keep their names in the user's
    model. Of the leaves ``sized`` only sizes and the device are read.
    """

    layers: range
    module: nn.Module
    batch_inputs: tuple[int, ...]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    is_last: bool
    outputs: tuple[int, ...] = ()
    sized: frozenset[int] = frozenset()


class OutputLayout(Protocol):
    """The model's result before the loss is computed from it.

    ``specs`` describe its tensors in a fixed order, without the loss. If they are not available,
    ``problem`` says why.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, in order."""
        ...

    @property
    def problem(self) -> str:
        """Why the outputs are not available; empty if they are."""
        ...

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's result filled with ``tensors``, with ``None`` in place of the loss."""
        ...


class LayerGraph(Protocol):
    """A captured model, as planning, measuring and running need it."""

    @property
    def name(self) -> str:
        """The name of the model's class."""
        ...

    @property
    def model(self) -> nn.Module:
        """The captured model."""
        ...

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Distinct names of the layers, in order of execution."""
        ...

    @property
    def mixing(self) -> str:
        """Why micro-batches cannot give the result of the whole batch; empty if they can."""
        ...

    def own_module(self) -> nn.Module:
        """The user's model with its loss: ``forward(*leaves)`` returns the loss first.

        Names of the model's tensors start with ``model.``, those of the loss with ``loss.``.
        """
        ...

    @property
    def batch_size(self) -> int:
        """Samples in the example batch."""
        ...

    @property
    def parameter_uses(self) -> tuple[ParameterUse, ...]:
        """Every parameter and buffer, with the layers that read it."""
        ...

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Additional names of tied parameters, each with the parameter's first name."""
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

    @property
    def call(self) -> "BatchCall":
        """The structure of a batch, and which of its entries go where."""
        ...

    @property
    def summed_leaves(self) -> frozenset[int]:
        """The leaves from all rows of which the additional leaf of a step is computed.

        Stages that read that leaf (its index is the number of the batch's own leaves) need them.
        """
        ...

    def padded(self, leaves: Mapping[int, AnyLeaf]) -> dict[int, AnyLeaf]:
        """Leaves by index, filled up to a length at which the captured model can run.

        Raises:
            BadInput: there is no such length.
        """
        ...

    def as_one_step(self, batches: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The leaves of several batches that form one step.

        Values of the whole step that slices need then cover all batches; `batch_leaves` computes
        them for a step of one batch.
        """
        ...

    def parts_as_one_step(self, parts: Sequence[Sequence[PartialLeaf]]) -> list[list[PartialLeaf]]:
        """`as_one_step` for the parts of batches that this rank was given.

        The additional leaf is absent on ranks that lack a row of `summed_leaves`.
        """
        ...

    def as_own_steps(self, leaves: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves of a batch of which each micro-batch (rows ``cut``) is a step of its own."""
        ...

    @property
    def lengths(self) -> tuple[Length, ...]:
        """The lengths that vary from batch to batch, as declared."""
        ...

    @property
    def largest_lengths(self) -> LengthsOf:
        """The largest declared value of each length, or else that of the example batch."""
        ...

    def lengths_of(self, leaves: Mapping[int, Leaf]) -> LengthsOf:
        """The lengths of a batch with these leaves; the example's if no leaf shows a length.

        Raises:
            BadInput: the captured model cannot run at such a length.
        """
        ...

    def stage(self, layers: range) -> StageProgram:
        """The layers ``layers`` as one module, which shares the model's parameters."""
        ...

    @property
    def outputs(self) -> OutputLayout:
        """What the model returns, for predictions and metrics."""
        ...

    @property
    def output_layers(self) -> tuple[int, ...]:
        """The layer whose stage returns each output; empty if none are wanted."""
        ...

    @property
    def leaves_read(self) -> frozenset[int]:
        """The leaves of a batch that its stages read."""
        ...

    def targets(self, leaves: Mapping[int, torch.Tensor]) -> Batch:
        """What the loss function gets besides the output; without one, the whole batch."""
        ...

    def known_leaves(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The leaves of a batch that `leaves_read` names, by index; others may be missing.

        Raises:
            BadInput: as for `batch_leaves`, or a leaf that is read is missing.
        """
        ...

    def with_outputs(self) -> "LayerGraph":
        """A copy whose last stage also returns the model's outputs, after loss and weight.

        Raises:
            BadInput: the outputs are not available.
        """
        ...

    def without_loss(self) -> "LayerGraph":
        """A copy without the loss; each stage returns the outputs that it makes.

        Raises:
            BadInput: the outputs are not available.
        """
        ...
