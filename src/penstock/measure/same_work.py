"""Recognises layers that do the same work."""

from collections.abc import Hashable

import torch
from torch import fx, nn

from penstock.capture.layer_graph import LayerGraph
from penstock.capture.lengths import LengthsOf
from penstock.measure.layer_runs import LayerRun, storage_address
from penstock.profile.model_profile import Affine, Edge, SharedParameter

__all__ = ["edges_of", "parameters_of", "work_of"]


def work_of(run: LayerRun) -> Hashable | None:
    """The operators of a layer and the shapes of their inputs: equal for layers of equal cost.

    None for layers that are not captured graphs, since nothing is known about these.
    """
    module = run.program.module
    if not isinstance(module, fx.GraphModule):
        return None
    inputs = (*run.leaves, *run.received)
    addresses = [storage_address(tensor) for tensor in inputs]
    given = tuple(
        (_shape(tensor), addresses.index(address))
        for tensor, address in zip(inputs, addresses, strict=True)
    )
    return given, run.program.is_last, len(run.program.sent), _operators(module)


def _shape(tensor: torch.Tensor) -> Hashable:
    plain = (tensor.dtype, tensor.device, tensor.requires_grad)
    return (tuple(tensor.shape), tensor.stride(), *plain)


def _operators(module: fx.GraphModule) -> Hashable:
    """The operators of a stage. Its tensors count by shape, its modules by identity."""
    number: dict[fx.Node, str] = {}
    held: dict[int, int] = {}
    lines: list[Hashable] = []
    for node in module.graph.nodes:
        number[node] = f"%{len(number)}"
        target: Hashable = node.target
        if node.op == "get_attr":
            value = _attribute(module, str(node.target))
            first = held.setdefault(id(value), len(held))
            is_tensor = isinstance(value, torch.Tensor)
            target = (first, _shape(value)) if is_tensor else id(value)
        elif node.op == "placeholder":
            target = ""
        arguments = fx.map_arg((node.args, dict(node.kwargs)), number.__getitem__)  # pyright: ignore
        lines.append((node.op, target, repr(arguments)))
    return tuple(lines)


def _attribute(module: nn.Module, name: str) -> object:
    value: object = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def parameters_of(
    graph: LayerGraph,
) -> tuple[list[tuple[int, int]], tuple[SharedParameter, ...]]:
    """For each layer the bytes of its own parameters and of its buffers; and shared parameters.

    Parameters that are not trained need no gradient and no optimizer state, so they count as
    buffers. If several layers use one, it counts for each, since each may be on another stage.
    """
    own = [(0, 0)] * len(graph.layer_names)
    shared: list[SharedParameter] = []
    for use in graph.parameter_uses:
        if not use.layers:
            continue
        first = use.layers[0]
        parameters, buffers = own[first]
        if use.is_buffer:
            own[first] = (parameters, buffers + use.bytes)
        elif not use.requires_grad:
            for layer in use.layers:
                own[layer] = (own[layer][0], own[layer][1] + use.bytes)
        elif len(use.layers) > 1:
            shared.append(SharedParameter(use.name, use.bytes, use.layers))
        else:
            own[first] = (parameters + use.bytes, buffers)
    return own, tuple(shared)


def edges_of(graph: LayerGraph, lengths: LengthsOf) -> tuple[Edge, ...]:
    """One edge for each tensor and layer that reads it, for batches of these lengths.

    Bytes are affine in the number of samples.
    """
    edges: list[Edge] = []
    for example, producer, consumers in graph.crossings:
        spec = example.at(lengths)
        one, two = spec.bytes_for(1), spec.bytes_for(2)
        size = Affine(float(2 * one - two), float(two - one))
        back = size if spec.requires_grad else Affine()
        edges += (Edge(producer, consumer, spec.name, size, back) for consumer in consumers)
    return tuple(edges)
