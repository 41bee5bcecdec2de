"""From a model and one example batch to its layer graph."""

from typing import Literal, get_args

import torch
from torch import fx, nn

from penstock.capture.batch_layout import layout_of
from penstock.capture.chain import Chain
from penstock.capture.chain_graph import chain_graph
from penstock.capture.cleaning import WRAPPED_LOSS, WRAPPED_MODEL, CleanGraph, clean
from penstock.capture.dataflow import Dataflow, find_dataflow
from penstock.capture.export import export_module
from penstock.capture.graph_weight import add_weight
from penstock.capture.layer_graph import Batch, LayerGraph, LossFunction, ParameterUse
from penstock.capture.layers import Layers, find_layers, unit_function
from penstock.capture.loss_module import BatchCall, LossModule
from penstock.capture.tensor_specs import find_facts
from penstock.capture.traced_graph import ModelTensors, TracedGraph
from penstock.errors import BadInput

__all__ = ["Granularity", "capture_model"]

Granularity = Literal["block", "module", "operator"]


def capture_model(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossFunction | None = None,
    granularity: Granularity = "module",
) -> LayerGraph:
    """The layers of ``model`` with its loss, and the tensors between them.

    Nothing of the model changes. A model in evaluation mode is captured in training mode; modules
    in evaluation mode inside a model in training mode stay so (frozen batch norms).

    Raises:
        BadInput: the batch does not fit the model, no scalar mean loss comes out, or the
            granularity is unknown.
        CaptureFailed: the model cannot be traced; names the line, and the way out.
    """
    if granularity not in get_args(Granularity):
        raise BadInput(
            f'granularity is "{granularity}", but must be one of {", ".join(get_args(Granularity))}'
        )
    if isinstance(model, Chain):
        return chain_graph(model, batch, loss=loss)
    layout = layout_of(batch)
    call = BatchCall.of(layout, model.forward, has_loss=loss is not None)
    wrapper = LossModule(model, call, loss)
    tensors = _tensors(model, loss)
    traced = export_module(wrapper, layout.flatten(batch))
    cleaned = clean(traced, _attribute_names(tensors))
    _mark_parameters(cleaned, tensors)
    add_weight(cleaned)
    flow = find_dataflow(cleaned)
    facts = find_facts(cleaned, flow.sampled)
    layers = find_layers(flow, facts, unit_function(model, granularity), granularity)
    made_by, read_by = _crossings(flow, layers)
    specs = {
        node: facts.spec(node, layers.names[made_by[node]], layout.batch_size) for node in made_by
    }
    uses = _parameter_uses(flow, layers, tensors)
    return TracedGraph(model, layout, tensors, flow, layers, specs, made_by, read_by, uses)


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
    """From the names in the wrapper to the first names in the model."""
    first = {name: name for name in (*tensors.parameters, *tensors.buffers)} | dict(tensors.tied)
    inside = {WRAPPED_MODEL + name: known for name, known in first.items()}
    return inside | {name: known for name, known in first.items() if name.startswith(WRAPPED_LOSS)}


def _mark_parameters(cleaned: CleanGraph, tensors: ModelTensors) -> None:
    for node in cleaned.graph.nodes:
        if node.op == "get_attr" and str(node.target) in tensors.parameters:
            node.meta["is_parameter"] = True
            node.meta["requires_grad"] = tensors.parameters[str(node.target)].requires_grad


def _layer_needs(flow: Dataflow, layers: Layers) -> list[set[fx.Node]]:
    """What each layer reads: work of any layer, attributes, leaves."""
    needs: list[set[fx.Node]] = [set() for _ in layers.names]
    layer = 0
    for position, node in enumerate(flow.work):
        while layer + 1 < len(layers.starts) and position >= layers.starts[layer + 1]:
            layer += 1
        needs[layer] |= flow.needs[node]
    output = next(n for n in flow.clean.graph.nodes if n.op == "output")
    needs[-1] |= flow.needs[output]
    return needs


def _crossings(
    flow: Dataflow, layers: Layers
) -> tuple[dict[fx.Node, int], dict[fx.Node, tuple[int, ...]]]:
    """Of each work node that later layers read: its layer, and theirs."""
    needs = _layer_needs(flow, layers)
    made_by: dict[fx.Node, int] = {}
    read_by: dict[fx.Node, tuple[int, ...]] = {}
    layer = 0
    for position, node in enumerate(flow.work):
        while layer + 1 < len(layers.starts) and position >= layers.starts[layer + 1]:
            layer += 1
        readers = tuple(r for r in range(layer + 1, len(needs)) if node in needs[r])
        if readers:
            made_by[node], read_by[node] = layer, readers
    return made_by, read_by


def _parameter_uses(
    flow: Dataflow, layers: Layers, tensors: ModelTensors
) -> tuple[ParameterUse, ...]:
    """Every parameter and buffer; those that nothing reads belong to layer 0."""
    readers: dict[str, list[int]] = {}
    for layer, needs in enumerate(_layer_needs(flow, layers)):
        for name in {str(node.target) for node in needs if node.op == "get_attr"}:
            readers.setdefault(name, []).append(layer)
    uses: list[ParameterUse] = []
    for found, is_buffer in ((tensors.parameters, False), (tensors.buffers, True)):
        for name, tensor in found.items():
            size = tensor.numel() * tensor.element_size()
            used = tuple(readers.get(name, [0]))
            uses.append(ParameterUse(name, used, size, tensor.requires_grad, is_buffer))
    return tuple(uses)
