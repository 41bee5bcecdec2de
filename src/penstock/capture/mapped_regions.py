"""Keeps what ``torch.vmap`` records between two levels as one call.

Tracing records the operators of a mapped function between a call that opens a level and one that
closes it. Nothing reads the results of these two, but their order relative to the others matters:

    increment | add_batch_dim -> index -> and -> remove_batch_dim | decrement      one region

A region becomes one call of a body that holds the operators in their order.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.predispatch import (
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    lazy_load_decompositions,
)

from penstock.capture.operators import OPAQUE, OpaqueFacts, heavy_operator, random_operator

__all__ = ["keep_mapped_regions"]


def in_map(body: nn.Module, *inputs: Any) -> Any:
    """The results of a region, as a tuple."""
    lazy_load_decompositions()
    return body(*inputs)


def keep_mapped_regions(graph: fx.Graph) -> dict[str, fx.GraphModule]:
    """Replace every outermost region of ``graph`` by a call; returns the bodies by name."""
    bodies: dict[str, fx.GraphModule] = {}
    for number, region in enumerate(_regions(graph)):
        name = f"_bodies.mapped_{number}"
        bodies[name] = _collapse(graph, region, name)
    return bodies


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    found: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is _vmap_increment_nesting:
            if depth == 0:
                found.append([])
            depth += 1
        # Attributes stay outside, because they have the names of the model.
        if depth and node.op != "get_attr":
            found[-1].append(node)
        if node.target is _vmap_decrement_nesting:
            depth -= 1
    return found


def _collapse(graph: fx.Graph, region: Sequence[fx.Node], name: str) -> fx.GraphModule:
    """Replace ``region`` by a call, and by one node for each of its results."""
    inside = set(region)
    inputs = list(dict.fromkeys(n for m in region for n in m.all_input_nodes if n not in inside))
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    body = _body(region, inputs, outputs)
    values = tuple(node.meta.get("val") for node in outputs)
    with graph.inserting_after(region[-1]):
        attribute = graph.create_node("get_attr", name)
    with graph.inserting_after(attribute):
        call = graph.call_function(in_map, (attribute, *inputs))
    facts = OpaqueFacts(
        any(heavy_operator(node.target) for node in region),
        any(random_operator(node.target) for node in region),
        tuple(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values),
    )
    call.meta |= region[0].meta | {"val": values, OPAQUE: facts}
    for index, node in reversed(list(enumerate(outputs))):
        with graph.inserting_after(call):
            result = graph.call_function(operator.getitem, (call, index))
        result.meta |= node.meta | {OPAQUE: facts}
        node.replace_all_uses_with(result, lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)
    return body


def _body(
    region: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """The operators of ``region`` as a module from ``inputs`` to a tuple of ``outputs``."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta |= node.meta
    for node in region:
        new[node] = graph.node_copy(node, lambda old: new[old])
    graph.output(tuple(new[node] for node in outputs))
    return fx.GraphModule(nn.Module(), graph, "MappedRegion")
