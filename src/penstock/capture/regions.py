"""Regions of a graph (``torch.no_grad``, ``torch.autocast``), whose operators are in a body.

with torch.no_grad():                      with_gradients(False, body, average, h)
    self.average.mul_(0.9).add_(h)         body writes to its first input: so does the node
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.operators import (
    CHECKS,
    WRITES,
    is_check,
    packet_name,
    shares_storage,
    written_inputs,
)

__all__ = ["IS_BUFFER", "note_regions", "with_gradients"]

IS_BUFFER = "is_buffer"
"""The entry of a body input's ``meta`` that marks a tensor of the model."""


def with_gradients(enabled: bool, body: nn.Module, *inputs: Any) -> Any:
    """Run ``body`` with gradients on or off; torch's own operator leaves them off if it raises."""
    with torch.set_grad_enabled(enabled):
        return body(*inputs)


def note_regions(graph: fx.Graph, bodies: Mapping[str, nn.Module]) -> None:
    """Record in each region's node which arguments its body writes to, and whether it checks."""
    for node in graph.nodes:
        place = next((i for i, arg in enumerate(node.args) if _body(arg, bodies) is not None), None)
        if node.op != "call_function" or place is None:
            continue
        body = _body(node.args[place], bodies)
        assert body is not None
        note_regions(body.graph, dict(body.named_children()))
        node.meta[CHECKS] = any(is_check(n) or n.meta.get(CHECKS) for n in body.graph.nodes)
        if packet_name(node) == "wrap_with_set_grad_enabled":
            node.target = with_gradients
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        for placeholder, given in zip(inputs, node.args[place + 1 :], strict=True):
            if isinstance(given, fx.Node) and (given.op == "get_attr" or given.meta.get(IS_BUFFER)):
                placeholder.meta[IS_BUFFER] = True
        written = _written(body.graph)
        node.meta[WRITES] = tuple(
            place + 1 + i for i, placeholder in enumerate(inputs) if placeholder in written
        )


def _body(arg: Any, bodies: Mapping[str, nn.Module]) -> fx.GraphModule | None:
    if not isinstance(arg, fx.Node) or arg.op != "get_attr":
        return None
    found = bodies.get(str(arg.target))
    return found if isinstance(found, fx.GraphModule) else None


def _written(body: fx.Graph) -> set[fx.Node]:
    """The inputs of a body whose storage it writes to, also through views and inner regions."""
    root: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in body.nodes:
        sources = node.all_input_nodes
        shares = node.op == "call_function" and shares_storage(node)
        # A region may return one of its inputs.
        shares = shares or node.target is operator.getitem
        root[node] = root[sources[0]] if shares and sources else node
        written |= {root[source] for source in written_inputs(node)}
    return written
