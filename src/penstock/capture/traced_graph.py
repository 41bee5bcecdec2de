"""The layer graph of a traced model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.batch_layout import BatchLayout
from penstock.capture.dataflow import Dataflow
from penstock.capture.layer_graph import Batch, ParameterUse, StageProgram, TensorSpec
from penstock.capture.layers import Layers
from penstock.capture.stage_module import StagePart, build_module, needed
from penstock.errors import BadInput

__all__ = ["ModelTensors", "TracedGraph"]


@dataclass(frozen=True)
class ModelTensors:
    """Parameters and buffers of the user's model (and loss) by first name.

    ``tied`` are the further names; ``persistent`` tells which buffers a state dict holds.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    persistent: Mapping[str, bool]
    tied: Mapping[str, str]


@dataclass(frozen=True)
class TracedGraph:
    """A traced model as a :class:`LayerGraph`.

    ``made_by`` and ``read_by`` give the layers of each tensor that crosses; ``specs`` describe it.
    """

    model: nn.Module
    layout: BatchLayout
    tensors: ModelTensors
    flow: Dataflow
    layers: Layers
    specs: Mapping[fx.Node, TensorSpec]
    made_by: Mapping[fx.Node, int]
    read_by: Mapping[fx.Node, tuple[int, ...]]
    parameter_uses: tuple[ParameterUse, ...]

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Paths of the modules that the layers were called from, and ``loss``."""
        return self.layers.names

    @property
    def batch_size(self) -> int:
        """Samples in the example batch."""
        return self.layout.batch_size

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Further names of tied parameters, each with the first name of the same parameter."""
        return self.tensors.tied

    @property
    def crossings(self) -> tuple[tuple[TensorSpec, int, tuple[int, ...]], ...]:
        """Tensors read by later layers, in order of execution."""
        return tuple(
            (spec, self.made_by[node], self.read_by[node]) for node, spec in self.specs.items()
        )

    def batch_leaves(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in order, checked against the example (BadInput if unlike)."""
        return self.layout.flatten(batch)

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
        is_last = layers.stop == count
        received = [
            (node, spec)
            for node, spec in self.specs.items()
            if self.made_by[node] < layers.start and any(r in layers for r in self.read_by[node])
        ]
        sent = [
            node
            for node in self.specs
            if self.made_by[node] in layers and self.read_by[node][-1] >= layers.stop
        ]
        output = next(n for n in self.flow.clean.graph.nodes if n.op == "output")
        returned = list(output.all_input_nodes) if is_last else sent
        part = self._part(layers, received, returned)
        program = build_module(self.flow, part, self._attributes(), self._unused(layers))
        return StageProgram(
            layers,
            program,
            tuple(self.flow.clean.leaves.index(leaf) for leaf in part.leaves),
            tuple(spec for _, spec in received),
            () if is_last else tuple(self.specs[node] for node in sent),
            is_last,
        )

    def _part(
        self,
        layers: range,
        received: list[tuple[fx.Node, TensorSpec]],
        returned: list[fx.Node],
    ) -> StagePart:
        starts = (*self.layers.starts, len(self.flow.work))
        work = self.flow.work[starts[layers.start] : starts[layers.stop]]
        wanted = needed(self.flow, (*work, *returned), [node for node, _ in received])
        clean = self.flow.clean
        leaves = [leaf for leaf in clean.leaves if leaf in wanted]
        has_rows = any(spec.batch_dim >= 0 for _, spec in received)
        if not leaves and (not has_rows or not received) and {clean.rows, clean.device} & wanted:
            leaves = [clean.leaves[0]]
        return StagePart(work, leaves, received, returned)

    def _attributes(self) -> dict[str, Any]:
        """Everything a stage may hold, by name; buffers with whether they are persistent."""
        found: dict[str, Any] = {}
        found |= self.tensors.parameters
        for name, buffer in self.tensors.buffers.items():
            found[name] = (buffer, self.tensors.persistent[name])
        found |= {name: (tensor, False) for name, tensor in self.flow.clean.constants.items()}
        found |= self.flow.clean.bodies
        return found

    def _unused(self, layers: range) -> list[str]:
        """Tensors that nothing reads; the first stage holds them, so that checkpoints are whole."""
        if layers.start > 0:
            return []
        read = {str(n.target) for n in self.flow.clean.graph.nodes if n.op == "get_attr"}
        return [use.name for use in self.parameter_uses if use.name not in read]
