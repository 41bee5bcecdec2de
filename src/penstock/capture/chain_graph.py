"""The layer graph of a :class:`Chain`: shapes come from running it, stages are slices of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from penstock.capture.batch_layout import layout_of
from penstock.capture.batch_part import AnyLeaf, Leaf, PartialLeaf
from penstock.capture.chain import Chain, call_next
from penstock.capture.chain_shapes import (
    Untouched,
    chain_outputs,
    chain_results,
    on_device_of,
    output_specs,
)
from penstock.capture.layer_graph import (
    Batch,
    LossFunction,
    ParameterUse,
    StageProgram,
    TensorSpec,
)
from penstock.capture.lengths import Length, LengthsOf
from penstock.capture.loss_module import BatchCall, LossModule, loss_in_result
from penstock.capture.loss_weight import LossWatch
from penstock.capture.model_outputs import StructuredOutputs, flatten_outputs
from penstock.capture.sample_mixing import batch_norm_in
from penstock.errors import BadInput, CaptureFailed

__all__ = ["ChainGraph", "chain_graph"]


View = Literal["loss", "loss and outputs", "outputs"]


@dataclass(frozen=True)
class ChainGraph:
    """A chain as a :class:`LayerGraph`: one layer for each module; the loss is the last layer.

    ``between[i]`` are the tensors from layer ``i`` to layer ``i + 1``; ``spreads[i]``: they come
    from a tuple. ``view`` says what is returned besides what is sent.
    """

    chain: Chain
    call: BatchCall
    loss: LossFunction | None
    between: tuple[tuple[TensorSpec, ...], ...]
    spreads: tuple[bool, ...]
    updated_buffers: frozenset[str]
    outputs: StructuredOutputs
    view: View = "loss"

    @property
    def name(self) -> str:
        """``Chain``, or the class derived from it."""
        return type(self.chain).__name__

    @property
    def model(self) -> Chain:
        """The chain."""
        return self.chain

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The modules' names, then ``loss`` if there is a loss function."""
        return self.chain.layer_names + (() if self.loss is None else ("loss",))

    @property
    def mixing(self) -> str:
        """Why micro-batches cannot give the result of the whole batch, as far as can be seen."""
        norm = batch_norm_in(self.chain.named_modules())
        if norm:
            return f"it mixes samples ({norm})"
        for layer, specs in enumerate(self.between[: len(self.layer_names) - 1]):
            if any(spec.reduced for spec in specs):
                return f"it mixes samples (layer '{self.layer_names[layer]}')"
        if self.updated_buffers:
            return f"its forward updates buffer '{min(self.updated_buffers)}'"
        return ""

    def own_module(self) -> LossModule:
        """The chain with its loss."""
        return LossModule(self.chain, self.call, self.loss)

    @property
    def batch_size(self) -> int:
        """Samples in the example batch."""
        return self.call.layout.batch_size

    @property
    def parameter_uses(self) -> tuple[ParameterUse, ...]:
        """Every parameter and buffer, with the modules that hold it."""
        uses: list[ParameterUse] = []
        for tensor, first, layers, is_buffer in self._tensors():
            size = tensor.numel() * tensor.element_size()
            uses.append(ParameterUse(first, layers, size, tensor.requires_grad, is_buffer))
        return tuple(uses)

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Additional names of parameters that several modules share, with the first name."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, tensor, _ in self._named():
            known = first.setdefault(id(tensor), name)
            if known != name:
                tied[name] = known
        return tied

    @property
    def crossings(self) -> tuple[tuple[TensorSpec, int, tuple[int, ...]], ...]:
        """The tensors between layers; each goes from its module to the next one only."""
        return tuple(
            (spec, layer, (layer + 1,))
            for layer, specs in enumerate(self.between[: self.last_layer])
            for spec in specs
        )

    @property
    def last_layer(self) -> int:
        """The layer that returns the loss, or the outputs if the loss is left out."""
        left_out = self.view == "outputs" and self.loss is not None
        return len(self.layer_names) - 1 - left_out

    @property
    def output_layers(self) -> tuple[int, ...]:
        """The layer whose stage returns each output; empty if none are wanted."""
        return () if self.view == "loss" else (self.last_layer,) * len(self.outputs.specs)

    @property
    def leaves_read(self) -> frozenset[int]:
        """The leaves of a batch that the layers read."""
        layout = self.call.inputs if self.view == "outputs" else self.call.layout
        return frozenset(layout.indices)

    def targets(self, leaves: Mapping[int, torch.Tensor]) -> Batch:
        """What the loss function gets besides the output; without one, the whole batch."""
        return self.call.target(leaves)

    def known_leaves(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The leaves of a batch that are read, by index (BadInput if unlike the example)."""
        return self.call.leaves(batch, self.leaves_read)

    def with_outputs(self) -> "ChainGraph":
        """A copy that also returns the chain's result, after loss and weight (BadInput if none)."""
        return self._seen("loss and outputs")

    def without_loss(self) -> "ChainGraph":
        """A copy that returns only the chain's result (BadInput if it has none)."""
        return self._seen("outputs")

    def _seen(self, view: View) -> "ChainGraph":
        if self.outputs.problem:
            raise BadInput(self.outputs.problem)
        return replace(self, view=view)

    @property
    def lengths(self) -> tuple[Length, ...]:
        """Empty: a chain runs for batches of one length."""
        return ()

    @property
    def largest_lengths(self) -> LengthsOf:
        """Empty."""
        return ()

    def lengths_of(self, leaves: Mapping[int, Leaf]) -> LengthsOf:
        """Empty."""
        return ()

    def batch_leaves(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of ``batch`` in order, checked against the example (BadInput if unlike)."""
        return self.call.layout.flatten(batch)

    @property
    def summed_leaves(self) -> frozenset[int]:
        """Empty."""
        return frozenset()

    def padded(self, leaves: Mapping[int, AnyLeaf]) -> dict[int, AnyLeaf]:
        """The leaves, unchanged."""
        return dict(leaves)

    def as_one_step(self, batches: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The leaves, unchanged."""
        return [list(leaves) for leaves in batches]

    def parts_as_one_step(self, parts: Sequence[Sequence[PartialLeaf]]) -> list[list[PartialLeaf]]:
        """The leaves, unchanged."""
        return [list(leaves) for leaves in parts]

    def as_own_steps(self, leaves: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves, unchanged."""
        return list(leaves)

    def stage(self, layers: range) -> StageProgram:
        """The modules ``layers`` as one module.

        Raises:
            BadInput: the range is empty or not within the chain.
            CaptureFailed: a module of another stage shares a buffer that forward updates.
        """
        count = len(self.layer_names)
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
            raise BadInput(
                f"a stage of layers {layers}, but layers must be a non-empty part of "
                f"range(0, {count}); change the plan's cuts"
            )
        self._check_updates(layers)
        first, last = layers.start == 0, layers.stop > self.last_layer
        has_loss = last and self.view != "outputs"
        indices = set(self.call.inputs.indices) if first else set()
        if has_loss:
            indices |= set(self.call.targets.indices)
        inputs = tuple(sorted(indices)) or (0,) * has_loss
        if layers.start > self.last_layer:
            return StageProgram(layers, _Nothing(), (), (), (), False)
        wanted = range(len(self.outputs.specs)) if last and self.view != "loss" else ()
        return StageProgram(
            layers,
            _ChainStage(self, range(layers.start, min(layers.stop, self.last_layer + 1)), inputs),
            inputs,
            () if first else self.between[layers.start - 1],
            () if last else self.between[layers.stop - 1],
            has_loss,
            tuple(wanted),
            frozenset(inputs) - indices,
        )

    def _check_updates(self, layers: range) -> None:
        for _, name, users, is_buffer in self._tensors():
            split = any(u in layers for u in users) and any(u not in layers for u in users)
            if is_buffer and split and name in self.updated_buffers:
                raise CaptureFailed(
                    f"buffer {name!r} is updated by forward and shared by layers {users}, which a "
                    "cut would separate; keep them in one stage"
                )

    def _named(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Names of parameters then buffers, including repeats; modules before the loss."""
        for name, tensor in self.chain.named_parameters(remove_duplicate=False):
            yield name, tensor, False
        for name, tensor in self.chain.named_buffers(remove_duplicate=False):
            yield name, tensor, True
        loss = self.loss
        if isinstance(loss, nn.Module) and loss is not self.chain.loss:
            for name, tensor in loss.named_parameters(prefix="loss", remove_duplicate=False):
                yield name, tensor, False
            for name, tensor in loss.named_buffers(prefix="loss", remove_duplicate=False):
                yield name, tensor, True

    def _tensors(self) -> list[tuple[torch.Tensor, str, tuple[int, ...], bool]]:
        """Every distinct tensor: itself, first name, layers that hold it, whether a buffer."""
        found: dict[int, tuple[torch.Tensor, str, set[int], bool]] = {}
        for name, tensor, is_buffer in self._named():
            layer = self.layer_names.index(name.split(".")[0])
            found.setdefault(id(tensor), (tensor, name, set(), is_buffer))[2].add(layer)
        return [(t, name, tuple(sorted(users)), b) for t, name, users, b in found.values()]


class _Nothing(nn.Module):
    """The stage of a loss that is left out."""

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Nothing."""
        return ()


class _ChainStage(nn.Module):
    """The modules of one stage under their names in the chain; see :class:`StageProgram`."""

    def __init__(self, graph: ChainGraph, layers: range, inputs: tuple[int, ...]) -> None:
        super().__init__()
        self._layers = tuple(graph.layer_names[i] for i in layers)
        for name in self._layers:
            if name != "loss" or graph.loss is None:
                self.add_module(name, graph.chain.get_submodule(name))
        self._has_loss = graph.loss is not None and self._layers[-1] == "loss"
        if self._has_loss:
            self.loss = graph.loss
        self._call = graph.call
        self._inputs = inputs
        self._is_first = layers.start == 0
        self._is_last = layers.stop > graph.last_layer
        self._view: View = graph.view
        self._gives_loss = self._is_last and graph.loss is None
        self._spread = self._is_first or graph.spreads[layers.start - 1]
        self._sends_tuple = self._is_last or graph.spreads[layers.stop - 1]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors to send, or the loss and its weight, then the outputs if wanted."""
        leaves = dict(zip(self._inputs, tensors, strict=False))
        received = tensors[len(self._inputs) :]
        if not self._is_last:
            value = self._run(leaves, received, nullcontext())
            return value if isinstance(value, tuple) else (value,)
        # Watching costs a few microseconds an operator, so only the loss is watched.
        watch = LossWatch()
        watched = self._view != "outputs" and not self._has_loss
        output = self._run(leaves, received, watch if watched else nullcontext())
        if self._view == "outputs":
            return self._flat(output)
        value = output
        if self._has_loss and self.loss is not None:
            with watch:
                value = self._call.loss(self.loss, output, leaves)
        loss = loss_in_result(value, "the loss function" if self._has_loss else "the last module")
        rows = next(iter(leaves.values())).shape[0]
        outputs = () if self._view == "loss" else self._flat(output)
        return loss, watch.weight(loss, rows), *outputs

    def _flat(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of the last module's result, without a loss that it returns itself."""
        loss = loss_in_result(output, "the last module") if self._gives_loss else None
        return tuple(flatten_outputs(output, loss).tensors)

    def _run(
        self,
        leaves: dict[int, torch.Tensor],
        received: tuple[torch.Tensor, ...],
        watch: AbstractContextManager[object],
    ) -> Any:
        """Run the modules, the last one inside ``watch``."""
        names = [name for name in self._layers if not (self._has_loss and name == "loss")]
        value: Any = received if self._spread else received[0]
        for position, name in enumerate(names):
            module = self.get_submodule(name)
            with watch if position == len(names) - 1 else nullcontext():
                if position == 0 and self._is_first:
                    value = self._call.call(module, leaves)
                else:
                    value = call_next(module, value)
        return value


def chain_graph(chain: Chain, batch: Batch, *, loss: LossFunction | None = None) -> ChainGraph:
    """The layer graph of ``chain``, with shapes from running it at two batch sizes.

    Buffers and random state are restored. On the meta device nothing is computed.

    Raises:
        BadInput: a module returns something other than tensors, the rows of a tensor are no
            multiple of the samples, or there are two loss functions.
    """
    if loss is not None and chain.loss is not None and loss is not chain.loss:
        raise BadInput(
            "the chain has a loss function and another was passed as loss=...; pass only one"
        )
    loss = chain.loss if loss is None else loss
    layout = layout_of(batch)
    first = chain.get_submodule(chain.layer_names[0])
    call = BatchCall.of(layout, first.forward, has_loss=loss is not None)
    leaves = on_device_of(chain, layout.flatten(batch))
    longer = [torch.cat([leaf, leaf[:1]]) for leaf in leaves]
    layers = len(chain.layer_names) + (loss is not None)
    with Untouched(chain, loss) as untouched:
        outputs = chain_outputs(chain, call, leaves, layers)
        updated = frozenset(untouched.changed())
        grown = chain_outputs(chain, call, longer, layers)
    between = tuple(
        output_specs(name, layout, small, large)
        for name, small, large in zip(chain.layer_names, outputs, grown, strict=False)
    )
    spreads = tuple(output.is_tuple for output in outputs)
    hops = layers - 1
    results = chain_results(layout, outputs[-1], grown[-1])
    return ChainGraph(chain, call, loss, between[:hops], spreads[:hops], updated, results)
