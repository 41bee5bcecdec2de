"""The layer graph of a traced model.

Values of the whole step that slices of a batch need: computed once, and sent as a last leaf.

A loss with several terms divides each by its own number of terms over the whole step (see
`penstock.capture.loss_terms`). These numbers depend only on the batch, which every rank has, so
each rank computes them before the iteration. They form one row, equal for every sample, so this
leaf can be cut into slices like any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.batch_part import AnyLeaf, Leaf, PartialLeaf
from penstock.capture.crossings import Crossings
from penstock.capture.dataflow import Dataflow
from penstock.capture.layer_graph import Batch, LossFunction, ParameterUse, StageProgram, TensorSpec
from penstock.capture.layers import Layers
from penstock.capture.length_conditions import LengthConditions
from penstock.capture.lengths import Length, LengthsOf
from penstock.capture.loss_module import BatchCall, LossModule
from penstock.capture.loss_weight import target_weight
from penstock.capture.model_outputs import StructuredOutputs
from penstock.capture.operators import packet_name
from penstock.capture.output_views import (
    OutputView,
    outputs_beside_loss,
    outputs_without_loss,
)
from penstock.capture.sample_mixing import mixing_operator
from penstock.capture.stage_module import (
    StagePart,
    build_module,
    leaves_of_lengths,
    needed,
    sized_only,
)
from penstock.capture.tensor_specs import TensorFacts
from penstock.errors import BadInput

__all__ = ["ModelTensors", "TracedGraph", "whole_values"]


class WholeValues:
    """Computes the values of a step from the leaves ``indices`` of its batches.

    ``counts[i]``: value ``i`` is a number of valid targets. ``adds[i]``: the value of two batches
    together is the sum of their values. Of the leaves ``sized`` only sizes are read; ``read`` are
    the others.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        indices: Sequence[int],
        counts: Sequence[bool],
        adds: Sequence[bool],
        sized: frozenset[int],
    ) -> None:
        self._module = module
        self.read = frozenset(indices) - sized
        self._indices, self._counts, self._adds = tuple(indices), tuple(counts), tuple(adds)

    def beside(self, batches: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The leaves of every batch, with the additional last leaf; all batches are one step.

        Raises:
            BadInput: batches have different lengths, and a value needs them joined.
        """
        rows = self._rows([self._read(batch) for batch in batches])
        return [
            [*batch, row.expand(batch[0].shape[0], -1)]
            for batch, row in zip(batches, rows, strict=True)
        ]

    def beside_parts(self, parts: Sequence[Sequence[PartialLeaf]]) -> list[list[PartialLeaf]]:
        """The leaves of every part; the additional one is absent where a row to read is absent.

        Raises:
            BadInput: as `beside`.
        """
        found = [self._whole(part) for part in parts]
        read = [leaves for leaves in found if leaves is not None]
        if len(read) < len(parts):
            return [[*part, beside_these(part, None)] for part in parts]
        rows = self._rows(read)
        return [[*part, beside_these(part, row)] for part, row in zip(parts, rows, strict=True)]

    def _rows(self, read: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The values of one step for each of its batches; these are the leaves that are read.

        Raises:
            BadInput: see `beside`.
        """
        alike = all([x.shape[1:] for x in own] == [x.shape[1:] for x in read[0]] for own in read)
        if alike:
            joined = [torch.cat(parts) if len(read) > 1 else parts[0] for parts in zip(*read)]  # noqa: B905
            row = self._row(joined)
        elif all(self._adds):
            row = torch.stack([self._row(own) for own in read]).sum(0)
        else:
            raise BadInput(
                f"a step was given {len(read)} batches of different lengths, but a term of the "
                f"loss is divided by a number that must be computed from all of them together; pad "
                f"them to one length, or give each a step of its own"
            )
        return [row] * len(read)

    def of_each_part(self, batch: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves of a batch with a last leaf that differs between the parts ``cut``.

        If a part has no valid target for a term, its sum is 0 and its divisor 1 instead of 0: such
        a micro-batch does not change the weights.
        """
        read, found = self._whole(batch), list[torch.Tensor]()
        if read is None:
            return [*batch, beside_these(batch, None)]
        for rows in cut:
            row = self._row([leaf[rows.start : rows.stop] for leaf in read], empty=1.0)
            found.append(row.expand(len(rows), -1))
        whole = torch.cat(found)
        is_part = isinstance(batch[0], PartialLeaf)
        return [*batch, beside_these(batch, whole) if is_part else whole]

    def _row(self, leaves: Sequence[torch.Tensor], empty: float = 0.0) -> torch.Tensor:
        """All values side by side; ``empty`` replaces a count of 0."""
        with torch.no_grad():
            found = [torch.as_tensor(value).to(torch.float64) for value in self._module(*leaves)]
        for place, is_count in enumerate(self._counts):
            if is_count and empty:
                found[place] = torch.where(found[place] == 0, empty, found[place])
        return torch.cat([value.reshape(-1) for value in found])

    def _read(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The leaves to read, on the CPU, where tensors made by the model's code are."""
        return on_cpu([batch[index] for index in self._indices])

    def _whole(self, batch: Sequence[Leaf]) -> list[torch.Tensor] | None:
        """The same, where rows of a leaf may be on other ranks only: then ``None``."""
        whole = [whole_leaf(batch[i], sized=i not in self.read) for i in self._indices]
        found = [leaf for leaf in whole if leaf is not None]
        return on_cpu(found) if len(found) == len(whole) else None


def on_cpu(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the CPU; those on the meta device stay there."""
    return [leaf if leaf.is_meta else leaf.cpu() for leaf in leaves]


def whole_leaf(leaf: Leaf, *, sized: bool) -> torch.Tensor | None:
    """A leaf with all its rows, or its size only; ``None`` if rows are on other ranks only."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.without_values(leaf.shape[0]) if sized else leaf.whole


def beside_these(batch: Sequence[Leaf], row: torch.Tensor | None) -> PartialLeaf:
    """The additional leaf of a part of a batch, with the same values in every row; or absent."""
    first = batch[0]
    assert isinstance(first, PartialLeaf)
    samples = first.shape[0]
    if row is None:
        return PartialLeaf((samples, 0), torch.float64, first.number)
    values = row.expand(samples, -1)
    return PartialLeaf(values.shape, values.dtype, first.number, (range(samples),), values)


def whole_values(flow: Dataflow, attributes: Mapping[str, Any]) -> WholeValues | None:
    """The computation of the last leaf of ``flow``; None if no slice needs it.

    Raises:
        BadInput: a value is computed from a tensor on the meta device.
    """
    clean = flow.clean
    if not clean.wholes:
        return None
    wanted = needed(flow, clean.wholes, ())
    leaves = [leaf for leaf in clean.leaves if leaf in wanted]
    leaves = [*leaves, *leaves_of_lengths(flow, wanted, leaves)] or [clean.leaves[0]]
    part = StagePart((), leaves, (), clean.wholes)
    module = build_module(flow, part, attributes, ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise BadInput(
                f"the number of terms of the loss is computed from '{name}', which is on the meta "
                f"device; build it with its values"
            )
    counts = [node.target is target_weight for node in clean.wholes]
    adds = [
        is_count or node is clean.rows or packet_name(node) == "sum"
        for is_count, node in zip(counts, clean.wholes, strict=True)
    ]
    indices = [clean.leaves.index(leaf) for leaf in leaves]
    return WholeValues(module, indices, counts, adds, sized_only(module, indices))


@dataclass(frozen=True)
class ModelTensors:
    """Parameters and buffers of the user's model (and loss) by first name.

    ``tied`` are additional names; ``persistent`` says which buffers are in a state dict.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    persistent: Mapping[str, bool]
    tied: Mapping[str, str]


@dataclass(frozen=True)
class TracedGraph:
    """A traced model as a :class:`LayerGraph`; ``view`` is given if outputs are wanted."""

    model: nn.Module
    call: BatchCall
    tensors: ModelTensors
    flow: Dataflow
    facts: TensorFacts
    layers: Layers
    trained: Crossings
    parameter_uses: tuple[ParameterUse, ...]
    outputs: StructuredOutputs
    loss: LossFunction | None = None
    conditions: LengthConditions = field(default_factory=LengthConditions)
    view: OutputView | None = None

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Paths of the modules that the layers were called from, and ``loss``."""
        return self.layers.names

    @property
    def mixing(self) -> str:
        """Why micro-batches cannot give the result of the whole batch; empty if they can."""
        operator = mixing_operator(self.flow, self.facts)
        if operator:
            return f"it mixes samples ({operator})"
        if self.flow.updated:
            return f"its forward updates buffer '{min(self.flow.updated)}'"
        return ""

    def own_module(self) -> LossModule:
        """The user's model with its loss."""
        return LossModule(self.model, self.call, self.loss)

    @property
    def batch_size(self) -> int:
        """Samples in the example batch."""
        return self.call.layout.batch_size

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Additional names of tied parameters, each with the parameter's first name."""
        return self.tensors.tied

    @property
    def crossings(self) -> tuple[tuple[TensorSpec, int, tuple[int, ...]], ...]:
        """Tensors read by later layers, in order of execution."""
        found = self._crossings
        return tuple(
            (spec, found.made_by[node], found.read_by[node]) for node, spec in found.specs.items()
        )

    @property
    def _crossings(self) -> Crossings:
        return self.trained if self.view is None else self.view.crossings

    @property
    def _has_loss(self) -> bool:
        return self.view is None or self.view.work is None

    @property
    def output_layers(self) -> tuple[int, ...]:
        """The layer whose stage returns each output; empty if none are wanted."""
        return () if self.view is None else self.view.returned_by

    @property
    def leaves_read(self) -> frozenset[int]:
        """The leaves of a batch that layers may read."""
        leaves = self.flow.clean.leaves
        if self.view is None or self._has_loss:
            return frozenset(range(len(leaves)))
        return frozenset(leaves.index(leaf) for leaf in self.view.leaves)

    def targets(self, leaves: Mapping[int, torch.Tensor]) -> Batch:
        """What the loss function gets besides the output; without one, the whole batch."""
        return self.call.target(leaves)

    def known_leaves(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The leaves of a batch that are read, by index (BadInput if unlike the example)."""
        return self.call.leaves(batch, self.leaves_read)

    def with_outputs(self) -> "TracedGraph":
        """A copy that returns loss, weight and the model's outputs (BadInput if it has none)."""
        self._check_outputs()
        view = outputs_beside_loss(
            self.flow, self.facts, self.layers, self.batch_size, self.trained
        )
        return replace(self, view=view)

    def without_loss(self) -> "TracedGraph":
        """A copy that returns only the model's outputs (BadInput if it has none)."""
        self._check_outputs()
        view = outputs_without_loss(self.flow, self.facts, self.layers, self.batch_size)
        return replace(self, view=view)

    def _check_outputs(self) -> None:
        if self.outputs.problem:
            raise BadInput(self.outputs.problem)

    def batch_leaves(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in order, checked against the example (BadInput if unlike)."""
        leaves = self.call.layout.flatten(batch)
        return leaves if self._wholes is None else self._wholes.beside([leaves])[0]

    @property
    def summed_leaves(self) -> frozenset[int]:
        """The leaves that values of a whole step are computed from."""
        return frozenset() if self._wholes is None else self._wholes.read

    def padded(self, leaves: Mapping[int, AnyLeaf]) -> dict[int, AnyLeaf]:
        """The leaves, unchanged."""
        return dict(leaves)

    def as_one_step(self, batches: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The leaves of the batches of one step, with the values of the whole step if needed."""
        own = [list(leaves[: len(self.call.layout.leaves)]) for leaves in batches]
        return own if self._wholes is None else self._wholes.beside(own)

    def parts_as_one_step(self, parts: Sequence[Sequence[PartialLeaf]]) -> list[list[PartialLeaf]]:
        """The leaves of parts, with the values of the whole step if needed."""
        own = [list(leaves[: len(self.call.layout.leaves)]) for leaves in parts]
        return own if self._wholes is None else self._wholes.beside_parts(own)

    def as_own_steps(self, leaves: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves of a batch in which each micro-batch is a step of its own."""
        if self._wholes is None:
            return list(leaves)
        return self._wholes.of_each_part(leaves[: len(self.call.layout.leaves)], cut)

    @cached_property
    def _wholes(self) -> WholeValues | None:
        return whole_values(self.flow, self._attributes())

    @property
    def lengths(self) -> tuple[Length, ...]:
        """The lengths that vary from batch to batch, as declared."""
        return self.call.layout.lengths

    @property
    def largest_lengths(self) -> LengthsOf:
        """The largest declared value of each length, or else that of the example batch."""
        example = self.call.layout.example_lengths
        return tuple(
            size if length.max is None else length.max
            for length, size in zip(self.lengths, example, strict=True)
        )

    def lengths_of(self, leaves: Mapping[int, Leaf]) -> LengthsOf:
        """The lengths of a batch (BadInput if the captured code cannot run at these)."""
        if not self.lengths:
            return ()
        found = self.call.layout.lengths_of(leaves)
        problem = self.conditions.problem(found)
        if problem:
            raise BadInput(problem)
        return found

    def stage(self, layers: range) -> StageProgram:
        """The layers ``layers`` as one module, which shares the model's parameters.

        Raises:
            BadInput: the range is empty or not within the model's layers.
        """
        count = len(self.layers.names)
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
            raise BadInput(
                f"a stage of layers {layers}, but layers must be a non-empty part of "
                f"range(0, {count}); change the plan's cuts"
            )
        found = self._crossings
        is_last = layers.stop == count and self._has_loss
        received = [
            (node, spec)
            for node, spec in found.specs.items()
            if found.made_by[node] < layers.start and any(r in layers for r in found.read_by[node])
        ]
        sent = [
            node
            for node in found.specs
            if found.made_by[node] in layers and found.read_by[node][-1] >= layers.stop
        ]
        output = next(n for n in self.flow.clean.graph.nodes if n.op == "output")
        outputs = self._outputs_of(layers)
        returned = [*(output.all_input_nodes if is_last else sent)]
        returned += [self.flow.clean.outputs[i] for i in outputs]
        part = self._part(layers, received, returned)
        program = build_module(self.flow, part, self._attributes(), self._unused(layers))
        inputs = tuple(self.flow.clean.leaves.index(leaf) for leaf in part.leaves)
        return StageProgram(
            layers,
            program,
            inputs,
            tuple(spec for _, spec in received),
            () if is_last else tuple(found.specs[node] for node in sent),
            is_last,
            outputs,
            sized_only(program, inputs),
        )

    def _outputs_of(self, layers: range) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.output_layers) if layer in layers)

    def _part(
        self,
        layers: range,
        received: list[tuple[fx.Node, TensorSpec]],
        returned: list[fx.Node],
    ) -> StagePart:
        starts = (*self.layers.starts, len(self.flow.work))
        work = self.flow.work[starts[layers.start] : starts[layers.stop]]
        if self.view is not None and self.view.work is not None:
            wanted_work = self.view.work
            work = tuple(node for node in work if node in wanted_work)
        wanted = needed(self.flow, (*work, *returned), [node for node, _ in received])
        clean = self.flow.clean
        leaves = [leaf for leaf in clean.leaves if leaf in wanted]
        leaves += leaves_of_lengths(self.flow, wanted, leaves, self.leaves_read)
        has_rows = any(spec.has_plain_rows for _, spec in received)
        if not leaves and (not has_rows or not received) and {clean.rows, clean.device} & wanted:
            leaves = [self._any_leaf()]
        return StagePart(work, leaves, received, returned)

    def _any_leaf(self) -> fx.Node:
        """A leaf that shows the number of rows; one that is read, if any is."""
        leaves = self.flow.clean.leaves
        return leaves[min(self.leaves_read, default=0)]

    def _attributes(self) -> dict[str, Any]:
        """Everything that a stage may hold, by name; buffers with whether they are persistent."""
        found: dict[str, Any] = {}
        found |= self.tensors.parameters
        for name, buffer in self.tensors.buffers.items():
            found[name] = (buffer, self.tensors.persistent[name])
        for name, constant in self.flow.clean.constants.items():
            found[name] = (constant, False) if isinstance(constant, torch.Tensor) else constant
        found |= self.flow.clean.bodies
        return found

    def _unused(self, layers: range) -> list[str]:
        """Tensors that training does not read; a stage holds them to make checkpoints complete."""
        if not self._has_loss:
            return []
        read = {str(n.target) for n in self.flow.trained if n.op == "get_attr"}
        return [
            use.name
            for use in self.parameter_uses
            if use.name not in read and use.layers[0] in layers
        ]
