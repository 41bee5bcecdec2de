"""Recognises layers that do the same work."""

from collections.abc import Hashable

import torch
from torch import fx, nn

from penstock.measure.layer_runs import LayerRun
from penstock.measure.saved_tensors import storage_address

__all__ = ["work_of"]


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
