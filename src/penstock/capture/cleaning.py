"""Prepares an exported graph for cutting: no checks, no needless writes, no fixed devices.

Keeps what ``torch.vmap`` records between two levels as one call.

Tracing records the operators of a mapped function between a call that opens a level and one that
closes it. Nothing reads the results of these two, but their order relative to the others matters:

    increment | add_batch_dim -> index -> and -> remove_batch_dim | decrement      one region

A region becomes one call of a body that holds the operators in their order.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.predispatch import (
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    lazy_load_decompositions,
)

from penstock.capture.lengths import LengthPlaces, LengthsOf
from penstock.capture.operators import (
    OPAQUE,
    OpaqueFacts,
    argument_value,
    functional_twin,
    heavy_operator,
    is_assertion,
    is_check,
    is_grouped,
    is_mutation,
    is_view,
    packet_name,
    random_operator,
    shares_storage,
    tensor_value,
    written_inputs,
)
from penstock.capture.regions import note_regions
from penstock.capture.sizes import ROWS, BatchSymbols, batch_symbols, size_nodes

__all__ = ["CleanGraph", "clean", "device_of", "in_autocast"]

WRAPPED_MODEL = "model."
WRAPPED_LOSS = "loss."


@dataclass(frozen=True)
class CleanGraph:
    """A flat graph of operators whose attributes have the names of the user's model.

    ``rows``, ``lengths`` and ``device`` are nodes for the number of samples, the lengths and the
    device of a stage; each stage finds them in its own inputs. ``length_places[n]`` are the leaves
    and dimensions that have length ``n``. ``constants`` are tensors made by the code of the model
    (``torch.tensor(2.0)``). ``bodies`` are the graphs of regions such as ``torch.no_grad``, and the
    calls that are kept whole (`penstock.capture.opaque`). ``outputs`` are what the model returned
    besides the loss. ``terms`` are those of a loss that was given as a list. ``wholes`` are the
    contents of the last leaf if slices need values of the whole step (`loss_terms`).
    """

    graph: fx.Graph
    leaves: tuple[fx.Node, ...]
    rows: fx.Node
    device: fx.Node
    loss: fx.Node
    constants: Mapping[str, Any]
    bodies: Mapping[str, nn.Module]
    outputs: tuple[fx.Node, ...] = ()
    terms: tuple[fx.Node, ...] = ()
    wholes: tuple[fx.Node, ...] = ()
    lengths: tuple[fx.Node, ...] = ()
    length_places: LengthPlaces = ()
    symbols: BatchSymbols = field(default_factory=lambda: BatchSymbols({}))

    @cached_property
    def found_by_stage(self) -> frozenset[fx.Node]:
        """The nodes whose values a stage finds in its own inputs."""
        return frozenset((self.rows, self.device, *self.lengths))


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device of ``tensor``, which replaces a fixed device in a captured graph."""
    return tensor.device


def in_autocast(
    device: torch.device,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    body: nn.Module,
    *inputs: Any,
) -> Any:
    """Run ``body`` in the autocast region that the model's code opened, on the stage's device."""
    with torch.autocast(device.type, dtype, enabled, cache_enabled):
        return body(*inputs)


def clean(
    exported: fx.GraphModule,
    names: Mapping[str, str],
    terms: int = 0,
    length_places: LengthPlaces = (),
    example: LengthsOf = (),
) -> CleanGraph:
    """``exported``, cleaned; ``names`` map its attributes to the first names in the user's model.

    The graph returns the loss, then the ``terms`` of it, then what the model returned. ``example``
    are the traced lengths.
    """
    graph = exported.graph
    leaves = tuple(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(leaves[-1]):
        device = graph.call_function(device_of, (leaves[0],))
        rows = size_of(graph, leaves[0], 0)
        lengths = tuple(size_of(graph, leaves[i], dim) for (i, dim), *_ in length_places)
    symbols = batch_symbols(leaves, length_places, example)
    _drop_assertions(graph)
    constants, bodies = _rename_attributes(exported, names)
    note_regions(graph, bodies)
    _write_early(graph)
    size_nodes(graph, symbols, {ROWS: rows} | dict(zip(symbols.lengths, lengths, strict=True)))
    bodies |= keep_mapped_regions(graph)
    _own_copies_of_written_leaves(graph, leaves, {rows, device, *lengths})
    _write_to_new_tensors(graph)
    _follow_device(graph, device)
    for body in bodies.values():
        if isinstance(body, fx.GraphModule):
            _follow_device_inside(body)
    output = next(node for node in graph.nodes if node.op == "output")
    loss, *outputs = output.args[0]  # pyright: ignore[reportGeneralTypeIssues]
    _drop_unused(graph, keep={*leaves, rows, device, *lengths})
    new = _renumbered(graph)
    return CleanGraph(
        new[loss].graph,
        tuple(new[leaf] for leaf in leaves),
        new[rows],
        new[device],
        new[loss],
        constants,
        bodies,
        tuple(new[node] for node in outputs[terms:]),
        tuple(new[node] for node in outputs[:terms]),
        lengths=tuple(new[length] for length in lengths),
        length_places=length_places,
        symbols=symbols,
    )


def _renumbered(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """A copy of ``graph`` by old nodes; operators of one name are numbered from 0 on, in order.

    So their names, and those of the tensors between layers, do not depend on how the graph was
    made.
    """
    numbered, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        name = re.sub(r"_\d+$", "", node.name) if node.op == "call_function" else node.name
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), new.__getitem__)  # pyright: ignore
        new[node] = numbered.create_node(node.op, node.target, args, kwargs, name, node.type)
        new[node].meta = dict(node.meta)
    return new


def size_of(graph: fx.Graph, leaf: fx.Node, dim: int) -> fx.Node:
    """A node for the size of one dimension of a leaf."""
    node = graph.call_function(torch.ops.aten.sym_size.int, (leaf, dim))
    node.meta["val"] = leaf.meta["val"].shape[dim]
    return node


def _drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_module") and is_assertion(node):
            node.replace_all_uses_with(node.args[0]) if node.users else None
            graph.erase_node(node)


def _drop_unused(graph: fx.Graph, keep: set[fx.Node]) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and node not in keep:
            if is_check(node) or is_grouped(node):
                continue
            if node.op == "call_function" and is_mutation(node):
                continue
            graph.erase_node(node)


def _rename_attributes(
    exported: fx.GraphModule, names: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, nn.Module]]:
    """Give attributes the names of the user's model; return the other attributes."""
    constants: dict[str, Any] = {}
    bodies: dict[str, nn.Module] = {}
    for node in exported.graph.nodes:
        if node.op != "get_attr":
            continue
        target = str(node.target)
        if target in names:
            node.target = names[target]
            continue
        value: Any = operator.attrgetter(target)(exported)
        flat = target.replace(".", "_")
        if isinstance(value, nn.Module):
            node.target = f"_bodies.{flat}"
            bodies[node.target] = value
        else:
            node.target = f"_constants.{flat}"
            constants[node.target] = value
    return constants, bodies


def _own_copies_of_written_leaves(
    graph: fx.Graph, leaves: tuple[fx.Node, ...], shape_only: set[fx.Node]
) -> None:
    """Let code that writes to a view of the batch write to a copy that each stage makes."""
    storage = {leaf: leaf for leaf in leaves}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and shares_storage(node) and node.all_input_nodes:
            root = storage.get(node.all_input_nodes[0])
            if root is not None:
                storage[node] = root
        written |= {storage[n] for n in written_inputs(node) if n in storage}
    for leaf in written:
        with graph.inserting_after(leaves[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (leaf,))
        copy.meta.update(leaf.meta)
        kept = {copy, *shape_only}
        leaf.replace_all_uses_with(copy, delete_user_cb=lambda user, kept=kept: user not in kept)


def _write_early(graph: fx.Graph) -> None:
    """Move updates of buffers from the end of the graph to just after the buffer's last use.

    No cut can be made between a buffer's uses and its update.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.users:
            continue
        buffer, value = node.all_input_nodes[0], node.all_input_nodes[-1]
        held = [n for n in order if n.op == "get_attr" and n.target == buffer.target]
        uses = [user for one in held for user in one.users if user is not node and user in order]
        if not held or any(is_view(user) for user in uses):
            continue
        moved = [node]
        if packet_name(value) == "detach" and len(value.users) == 1:
            moved.append(value)
            value = value.all_input_nodes[0]
        last = max((*held, *uses, value), key=order.__getitem__)
        for one in moved:
            last.append(one)


def _write_to_new_tensors(graph: fx.Graph) -> None:
    """Replace in-place operators such as ``relu_`` by ``relu`` if no other view sees the write.

    A stage must not write to a tensor that it received, and its sender may need the old values.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_mutation(node):
            continue
        base, twin = next(written_inputs(node)), functional_twin(node)
        if twin is None or base.op == "get_attr" or base is not node.args[0]:
            continue
        if not _keeps_type(node, base) or _seen_through_views(node, base, order):
            continue
        later = [user for user in base.users if order.get(user, -1) > order[node]]
        for user in later:
            user.replace_input_with(base, node)
        node.target = twin


def _keeps_type(node: fx.Node, base: fx.Node) -> bool:
    """Whether the new tensor has the type of the old one, without promotion by other operands."""
    value = tensor_value(base)
    if value is None:
        return False
    operands = [tensor_value(n) for n in node.all_input_nodes if n is not base]
    kept = packet_name(node) in ("copy_", "masked_fill_", "index_put_", "scatter_", "fill_")
    return kept or all(o is None or o.dtype == value.dtype or o.dim() == 0 for o in operands)


def _seen_through_views(node: fx.Node, base: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether something reads the written storage after ``node`` through another view."""
    same: set[fx.Node] = {base}
    root = base
    while root.op == "call_function" and shares_storage(root) and root.all_input_nodes:
        root = root.all_input_nodes[0]
        same.add(root)
    if root.op == "get_attr":
        return True
    for other in order:
        if other.op == "call_function" and shares_storage(other) and other is not node:
            inputs = other.all_input_nodes
            if inputs and inputs[0] in same and order[other] < order[node]:
                same.add(other)
    return any(order.get(user, -1) > order[node] for other in same - {base} for user in other.users)


def _follow_device(graph: fx.Graph, device: fx.Node) -> None:
    """Replace every fixed device by that of the stage."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if packet_name(node) == "wrap_with_autocast":
            _, *rest = node.args
            node.target = in_autocast
            node.args = (device, *rest)
        elif isinstance(node.target, torch._ops.OpOverload):
            _replace_device(node, device)


def _replace_device(node: fx.Node, device: fx.Node) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if isinstance(argument_value(node, position, argument.name), torch.device):
            if position < len(node.args):
                node.update_arg(position, device)
            else:
                node.update_kwarg(argument.name, device)


def _follow_device_inside(body: fx.GraphModule) -> None:
    """Do the same inside a region; there the device is that of its first tensor."""
    graph = body.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    tensors = [n for n in inputs if tensor_value(n) is not None]
    for child in body.children():
        if isinstance(child, fx.GraphModule):
            _follow_device_inside(child)
    _drop_assertions(graph)
    if tensors:
        with graph.inserting_after(inputs[-1]):
            device = graph.call_function(device_of, (tensors[0],))
        _follow_device(graph, device)
    body.recompile()


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
