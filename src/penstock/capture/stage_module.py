"""Builds the module of one stage of a captured graph."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.cleaning import device_of
from penstock.capture.dataflow import Dataflow
from penstock.capture.layer_graph import TensorSpec

__all__ = ["StagePart", "build_module", "leaves_of_lengths", "needed", "sized_only"]


@dataclass(frozen=True)
class StagePart:
    """The content of a stage: work in order, leaves and tensors it gets, nodes it returns."""

    work: Sequence[fx.Node]
    leaves: Sequence[fx.Node]
    received: Sequence[tuple[fx.Node, TensorSpec]]
    returned: Sequence[fx.Node]


def needed(flow: Dataflow, targets: Iterable[fx.Node], given: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes that are needed to compute ``targets`` from ``given``."""
    found: set[fx.Node] = set()
    pending, stop = list(targets), set(given)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node not in stop and node not in flow.clean.found_by_stage:
            pending += flow.inputs(node)
    return found


def leaves_of_lengths(
    flow: Dataflow,
    wanted: Collection[fx.Node],
    leaves: Sequence[fx.Node],
    read: Collection[int] | None = None,
) -> list[fx.Node]:
    """Leaves that show the wanted lengths, if none of ``leaves`` does.

    They are among those with the indices ``read``, if given.
    """
    clean, more = flow.clean, list[fx.Node]()
    for node, places in zip(clean.lengths, clean.length_places, strict=True):
        having = [clean.leaves[leaf] for leaf, _ in places if read is None or leaf in read]
        if node in wanted and not any(leaf in (*leaves, *more) for leaf in having):
            more.append(having[0])
    return more


def build_module(
    flow: Dataflow, part: StagePart, attributes: Mapping[str, Any], extra: Iterable[str]
) -> fx.GraphModule:
    """The module of ``part``; it shares ``attributes`` without copies, and holds ``extra`` ones."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for leaf in part.leaves:
        new[leaf] = graph.placeholder(leaf.name)
    for node, _ in part.received:
        new[node] = graph.placeholder(node.name)
    wanted = needed(flow, (*part.work, *part.returned), new)
    if flow.clean.rows in wanted:
        new[flow.clean.rows] = _rows(graph, flow, part, new)
    if flow.clean.device in wanted:
        source = next(iter(new.values()))
        new[flow.clean.device] = graph.call_function(device_of, (source,))
    for node, places in zip(flow.clean.lengths, flow.clean.length_places, strict=True):
        if node in wanted:
            leaf, dim = next(p for p in places if flow.clean.leaves[p[0]] in new)
            size = torch.ops.aten.sym_size.int
            new[node] = graph.call_function(size, (new[flow.clean.leaves[leaf]], dim))
    for node in flow.clean.graph.nodes:
        if node in wanted and node not in new and node.op != "output":
            new[node] = graph.node_copy(node, lambda old: new[old])
    graph.output(tuple(new[node] for node in part.returned))
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    holder = _holder({name: attributes[name] for name in [*sorted(used), *extra]})
    module = fx.GraphModule(holder, graph, "StageModule")
    _share(module, holder)
    return module


def sized_only(module: fx.GraphModule, leaves: Sequence[int]) -> frozenset[int]:
    """Those of the leaves, the first arguments of a module, whose values it does not read."""
    sizes = (torch.ops.aten.sym_size.int, device_of)
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(
        leaf
        for leaf, place in zip(leaves, places, strict=False)
        if all(user.target in sizes for user in place.users)
    )


def _rows(
    graph: fx.Graph, flow: Dataflow, part: StagePart, new: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """The number of samples of the stage's slice, from a leaf or from a received tensor."""
    size = torch.ops.aten.sym_size.int
    if part.leaves:
        return graph.call_function(size, (new[part.leaves[0]], 0))
    for node, spec in part.received:
        if spec.has_plain_rows:
            rows = graph.call_function(size, (new[node], spec.batch_dim))
            if spec.rows_per_sample == 1:
                return rows
            return graph.call_function(_divide, (rows, spec.rows_per_sample))
    raise AssertionError("a stage without batch and received rows must be given a leaf")


def _divide(rows: int, rows_per_sample: int) -> int:
    """Samples of a tensor with several rows per sample."""
    return rows // rows_per_sample


def _holder(attributes: Mapping[str, Any]) -> nn.Module:
    """A tree of modules that holds ``attributes`` under their dotted names."""
    root = nn.Module()
    for name, value in attributes.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            child = owner._modules.get(part)
            if child is None:
                child = nn.Module()
                owner.add_module(part, child)
            owner = child
        match value:
            case nn.Parameter():
                owner.register_parameter(last, value)
            case (torch.Tensor() as tensor, bool() as persistent):
                owner.register_buffer(last, tensor, persistent=persistent)
            case nn.Module():
                owner.add_module(last, value)
            case _:
                # An argument of a higher-order operator other than a tensor, like a tree spec.
                object.__setattr__(owner, last, value)
    return root


def _share(module: fx.GraphModule, holder: nn.Module) -> None:
    """Move the attributes of ``holder`` to ``module``, where fx makes all buffers persistent."""
    for name, child in holder.named_children():
        module.add_module(name, child)
    for name, tensor in holder._parameters.items():
        module.register_parameter(name, tensor)
    for name, tensor in holder._buffers.items():
        module._buffers.pop(name, None)
        persistent = name not in holder._non_persistent_buffers_set
        module.register_buffer(name, tensor, persistent=persistent)
