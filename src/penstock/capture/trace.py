"""Makes the layer graph of a model from one example batch."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from penstock.capture.batch_layout import layout_of
from penstock.capture.bucket_graph import capture_buckets, has_buckets
from penstock.capture.capture_errors import LengthFixed
from penstock.capture.chain import Chain
from penstock.capture.chain_graph import ChainGraph, chain_graph
from penstock.capture.cleaning import WRAPPED_LOSS, WRAPPED_MODEL, CleanGraph, clean
from penstock.capture.crossings import find_crossings, layer_needs
from penstock.capture.dataflow import Dataflow, find_dataflow
from penstock.capture.export import export_module
from penstock.capture.graph_weight import add_weight
from penstock.capture.layer_graph import Batch, LayerGraph, Loss, LossFunction, ParameterUse
from penstock.capture.layers import Layers, find_layers, unit_function
from penstock.capture.length_conditions import LengthConditions, guards_of
from penstock.capture.lengths import Dynamic, named_lengths
from penstock.capture.loss_module import BatchCall, LossModule, ReturnedOutputs, as_function
from penstock.capture.model_outputs import Flattened
from penstock.capture.output_views import describe_outputs
from penstock.capture.record_model import record_model
from penstock.capture.tensor_specs import find_facts
from penstock.capture.traced_graph import ModelTensors, TracedGraph
from penstock.errors import BadInput, CaptureFailed

__all__ = ["Granularity", "capture_model"]

Granularity = Literal["block", "module", "operator"]


def capture_model(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    granularity: Granularity = "module",
    dynamic: Dynamic | None = None,
) -> LayerGraph:
    """The layers of ``model`` with its loss, and the tensors between them.

    ``dynamic`` names the dimensions of the batch that vary besides the samples, for example
    ``{"input_ids": {1: "length"}, "labels": {1: "length"}}``; equal names mean equal sizes. A model
    that cannot be captured for every length is captured once for each bucket of its `Length`.

    The model stays unchanged. A model in evaluation mode is captured in training mode; modules in
    evaluation mode inside a model in training mode stay so (frozen batch norms).

    Raises:
        BadInput: the batch does not fit the model, the loss is not a scalar or cannot be computed
            from slices of a batch, or the granularity is unknown.
        CaptureFailed: the model cannot be traced; names the line and a remedy.
    """
    if granularity not in get_args(Granularity):
        raise BadInput(
            f'granularity is "{granularity}", but must be one of {", ".join(get_args(Granularity))}'
        )
    _check_wrappers(model)
    # For a while, until stages run the user's program by default.
    if os.environ.get("PENSTOCK_CAPTURE") == "recorded":
        options: Any = {"loss": loss, "granularity": granularity, "dynamic": dynamic}
        recorded: Any = record_model(model, batch, **options)
        return recorded
    one_length = partial(_captured, model, loss, granularity, dynamic=None)
    if not dynamic:
        return one_length(batch)
    in_buckets = has_buckets(named_lengths(dynamic))
    if isinstance(model, Chain) and not in_buckets:
        raise BadInput(
            "a Chain runs for batches of one length, but dynamic=... was given; declare buckets, "
            "Length('length', buckets=(16, 32)), or leave it out"
        )
    try:
        if not isinstance(model, Chain):
            return _captured(model, loss, granularity, batch, dynamic=dynamic)
    except CaptureFailed:
        if not in_buckets:
            raise
    return capture_buckets(model, batch, dynamic, one_length)


def _check_wrappers(model: nn.Module) -> None:
    """Raise `BadInput` for wrappers that do themselves what a pipeline does."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise BadInput(
            "the model is a DistributedDataParallel, whose work a pipeline does itself: it sums "
            "the gradients of replicas; pass the bare module (model.module)"
        )
    for name, part in model.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise BadInput(
                f"'{name}' is a SyncBatchNorm, which is not needed here: the replicas of a stage "
                f"share the statistics of each micro-batch; leave convert_sync_batchnorm out"
            )


def _captured(
    model: nn.Module,
    loss: Loss | None,
    granularity: Granularity,
    batch: Batch,
    *,
    dynamic: Dynamic | None,
) -> TracedGraph | ChainGraph:
    """The graph of ``model`` for batches of every length in ``dynamic``."""
    if isinstance(model, Chain):
        return chain_graph(model, batch, loss=as_function(loss))
    layout, loss = layout_of(batch, dynamic), as_function(loss)
    call = BatchCall.of(layout, model.forward, has_loss=loss is not None)
    tensors = _tensors(model, loss)
    leaves = layout.flatten(batch)
    cleaned, outputs, conditions = _traced(model, call, loss, leaves, _attribute_names(tensors))
    conditions.check(type(model).__name__)
    _mark_parameters(cleaned, tensors)
    cleaned = add_weight(cleaned)
    flow = find_dataflow(cleaned)
    facts = find_facts(cleaned, flow.sampled)
    layers = find_layers(flow, facts, unit_function(model, granularity), granularity)
    crossings = find_crossings(flow, facts, layers, layout.batch_size)
    uses = _parameter_uses(flow, layers, tensors)
    described = describe_outputs(outputs, flow, facts, layout.batch_size)
    return TracedGraph(
        model, call, tensors, flow, facts, layers, crossings, uses, described, loss, conditions
    )


def _traced(
    model: nn.Module,
    call: BatchCall,
    loss: LossFunction | None,
    leaves: Sequence[torch.Tensor],
    names: Mapping[str, str],
) -> tuple[CleanGraph, Flattened, LengthConditions]:
    """The graph of model and loss, the structure of the model's outputs, and length conditions.

    Outputs that cannot be described must not prevent training. So if they may be the reason that
    tracing failed, the model is traced again without them.
    """
    layout, outputs = call.layout, ReturnedOutputs()

    def cleaned(module: LossModule) -> tuple[CleanGraph, LengthConditions]:
        exported = export_module(module, leaves, layout)
        conditions = guards_of(exported, layout)
        places, example = layout.length_places, layout.lengths_of(dict(enumerate(leaves)))
        graph = clean(exported, names, module.terms, places, example)
        return graph, conditions.with_relations(graph.symbols.relations)

    try:
        graph, conditions = cleaned(LossModule(model, call, loss, outputs))
        return graph, outputs.found, conditions
    except LengthFixed:
        raise
    except CaptureFailed as failure:
        if not outputs.reached:
            raise
        try:
            graph, conditions = cleaned(LossModule(model, call, loss))
        except CaptureFailed:
            raise failure from None
        untraced = Flattened(problem=f"the model's outputs cannot be traced: {failure}")
        return graph, untraced, conditions


def _tensors(model: nn.Module, loss: LossFunction | None) -> ModelTensors:
    """Parameters and buffers of model and loss; those of the loss under ``loss.``."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    persistent: dict[str, bool] = {}
    roots = [("", model)]
    if isinstance(loss, nn.Module):
        if isinstance(getattr(model, "loss", None), nn.Module):
            raise BadInput(
                f'{type(model).__name__} has a module named "loss" and a loss module was given, '
                "so their parameters would share names; rename the model's, or pass a function"
            )
        roots.append(("loss", loss))
    for prefix, root in roots:
        for name, parameter in root.named_parameters(prefix, remove_duplicate=False):
            known = first.setdefault(id(parameter), name)
            (parameters if known == name else tied)[name] = parameter if known == name else known  # pyright: ignore
        for name, buffer in root.named_buffers(prefix, remove_duplicate=False):
            known = first.setdefault(id(buffer), name)
            if known == name:
                buffers[name] = buffer
                persistent[name] = _is_persistent(root, name.removeprefix(f"{prefix}."))
            else:
                tied[name] = known
    return ModelTensors(parameters, buffers, persistent, tied)


def _is_persistent(root: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last not in root.get_submodule(path)._non_persistent_buffers_set


def _attribute_names(tensors: ModelTensors) -> dict[str, str]:
    """A map from names in the wrapper to the first names in the model."""
    first = {name: name for name in (*tensors.parameters, *tensors.buffers)} | dict(tensors.tied)
    inside = {WRAPPED_MODEL + name: known for name, known in first.items()}
    return inside | {name: known for name, known in first.items() if name.startswith(WRAPPED_LOSS)}


def _mark_parameters(cleaned: CleanGraph, tensors: ModelTensors) -> None:
    for node in cleaned.graph.nodes:
        if node.op == "get_attr" and str(node.target) in tensors.parameters:
            node.meta["is_parameter"] = True
            node.meta["requires_grad"] = tensors.parameters[str(node.target)].requires_grad


def _parameter_uses(
    flow: Dataflow, layers: Layers, tensors: ModelTensors
) -> tuple[ParameterUse, ...]:
    """Every parameter and buffer, with its layers; those that nothing reads belong to layer 0.

    Those that are needed only for outputs belong to the last layer.
    """
    readers: dict[str, list[int]] = {}
    for layer, needs in enumerate(layer_needs(flow, layers)):
        for name in {str(node.target) for node in needs if node.op == "get_attr"}:
            readers.setdefault(name, []).append(layer)
    for node in {source for output in flow.clean.outputs for source in flow.needs[output]}:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), [len(layers.names) - 1])
    uses: list[ParameterUse] = []
    for found, is_buffer in ((tensors.parameters, False), (tensors.buffers, True)):
        for name, tensor in found.items():
            size = tensor.numel() * tensor.element_size()
            used = tuple(readers.get(name, [0]))
            uses.append(ParameterUse(name, used, size, tensor.requires_grad, is_buffer))
    return tuple(uses)
