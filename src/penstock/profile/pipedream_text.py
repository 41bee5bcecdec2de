"""Profiles in PipeDream's graph text format (SOSP 2019), which DAPPLE's planner also reads.

    node2 -- Conv2d -- forward_compute_time=3.4, backward_compute_time=6.8,
             activation_size=384000000.0, parameter_size=6835.0
            node1 -- node2

Times are in milliseconds and sizes in bytes, for one batch of the profiled size.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import inf
from pathlib import Path

from penstock.errors import BadInput
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    without_batch_inputs,
)

FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class Node:
    """One node line, in seconds and bytes for one batch of the profiled size."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float


def parse_pipedream(text: str, path: str | Path, profile_batch: int) -> ModelProfile:
    """The chain in a PipeDream graph text; ``path`` gives the name and is used in error messages.

    Nodes are put in a topological order that finishes one branch before the next. Input nodes,
    which read no other node, lose their times, as in PipeDream's planner: they are the loading of
    data. The profile's ``source`` lists them. The file has one batch size, so costs are
    proportional to it. It does not split the backward, so that is divided equally into its two
    halves. A layer saves its own output for the backward.
    """
    if profile_batch < 1:
        raise BadInput(f"profile '{path}': the profiled batch is {profile_batch}; give one >= 1")
    nodes, edges = node_graph(text, path)
    order = chain_order(nodes, edges, f"profile '{path}'")
    has_producer = {consumer for ends in edges.values() for consumer in ends}
    inputs = [name for name in order if name not in has_producer]
    index = {name: i for i, name in enumerate(order)}
    profile = ModelProfile(
        name=Path(path).stem,
        layers=tuple(layer_of_node(nodes[n], profile_batch, is_input=n in inputs) for n in order),
        edges=tuple(
            edge_between(nodes[name], index[name], index[consumer], profile_batch, name in inputs)
            for name in order
            for consumer in edges.get(name, ())
        ),
        batch_size=profile_batch,
        source=f"PipeDream text {Path(path).name}; {dropped_text(nodes[name] for name in inputs)}",
    )
    return without_batch_inputs(profile)


def node_graph(text: str, path: str | Path) -> tuple[dict[str, Node], dict[str, tuple[str, ...]]]:
    """The nodes by name, and for each node the nodes that read it."""
    nodes: dict[str, Node] = {}
    lines: dict[str, int] = {}
    consumers: dict[str, dict[str, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"profile '{path}', line {number}"
        if not line.strip():
            continue
        if line[0].isspace():
            producer, consumer = edge_of(line, where)
            consumers.setdefault(producer, {}).setdefault(consumer, number)
            continue
        node = node_of(line, where)
        if node.name in nodes:
            raise BadInput(
                f"{where}: node '{node.name}' is already on line {lines[node.name]}; give each "
                f"node its own name"
            )
        nodes[node.name], lines[node.name] = node, number
    check_ends(nodes, consumers, path)
    return nodes, {name: tuple(ends) for name, ends in consumers.items()}


def node_of(line: str, where: str) -> Node:
    """The node of a line that does not start with a space."""
    parts = [part.strip() for part in line.split(" -- ")]
    figures = parts[2] if len(parts) >= 3 else ""
    values: dict[str, float] = {}
    for figure in FIGURES:
        match = re.search(rf"{figure}=(\[[^\]]*\]|[^,\s]+)", figures)
        if not match:
            raise BadInput(
                f"{where}: '{line.strip()[:60]}' has no {figure}; write it like "
                f"'node1 -- name -- {FIGURES[0]}=1.0, {figure}=1.0, ...'"
            )
        values[figure] = sum_of(match.group(1), f"{where}: {figure}")
    forward, backward, activation, parameters = (values[figure] for figure in FIGURES)
    return Node(parts[0], parts[1], forward / 1000, backward / 1000, activation, parameters)


def sum_of(text: str, where: str) -> float:
    """A number, or the sum of a list ``[a; b]``."""
    try:
        values = [float(part) for part in text.strip("[]").split(";")]
    except ValueError:
        raise BadInput(f"{where} is '{text}'; write a number or a list [a; b]") from None
    if min(values) < 0 or not sum(values) < inf:
        raise BadInput(f"{where} is '{text}'; numbers must be finite and >= 0")
    return sum(values)


def edge_of(line: str, where: str) -> tuple[str, str]:
    """The two ends of an indented line."""
    ends = [end.strip() for end in line.split(" -- ")]
    if len(ends) != 2 or not all(ends):
        raise BadInput(f"{where}: '{line.strip()[:60]}' is no edge; write 'node1 -- node2'")
    return ends[0], ends[1]


def check_ends(
    nodes: Mapping[str, Node], consumers: Mapping[str, Mapping[str, int]], path: str | Path
) -> None:
    """Raise unless there are nodes and both ends of every edge are nodes."""
    if not nodes:
        raise BadInput(
            f"profile '{path}' has no node lines; a PipeDream text has one 'node1 -- name -- ...' "
            f"for each operator"
        )
    for producer, ends in consumers.items():
        for consumer, number in ends.items():
            for name in (producer, consumer):
                if name not in nodes:
                    raise BadInput(
                        f"profile '{path}', line {number}: an edge names '{name}', which has no "
                        f"node line; add the node or remove the edge"
                    )


def layer_of_node(node: Node, batch: int, *, is_input: bool) -> LayerCost:
    forward_s, half_s = (0.0, 0.0) if is_input else (node.forward_s, node.backward_s / 2)
    return LayerCost(
        name=f"{node.name} {node.description}",
        forward_s=Affine(0.0, forward_s / batch),
        backward_input_s=Affine(0.0, half_s / batch),
        backward_weight_s=Affine(0.0, half_s / batch),
        parameter_bytes=round(node.parameter_bytes),
        saved_bytes=Affine(0.0, 0.0 if is_input else node.activation_bytes / batch),
    )


def edge_between(node: Node, producer: int, consumer: int, batch: int, is_input: bool) -> Edge:
    """The edge for a node's output; no gradient flows back to an input."""
    size = Affine(0.0, node.activation_bytes / batch)
    return Edge(producer, consumer, node.name, size, Affine() if is_input else size)


def dropped_text(inputs: Iterable[Node]) -> str:
    """The times of input nodes that were left out, in words."""
    dropped = [
        f"{node.name} ({1000 * (node.forward_s + node.backward_s):g} ms)"
        for node in inputs
        if node.forward_s + node.backward_s > 0
    ]
    return f"times of input nodes left out: {', '.join(dropped) or 'none'}"


def chain_order(
    nodes: Iterable[str], edges: Mapping[str, tuple[str, ...]], where: str
) -> list[str]:
    """A topological order of ``nodes`` that finishes each branch before it starts another.

    ``edges[node]`` are the nodes that read ``node``. Among the ready nodes, the one whose producer
    came last goes first. So tensors are read soon, and few cross a cut. Ties keep the order of
    ``nodes``.

    >>> chain_order("abcd", {"a": ("b", "c"), "b": ("d",), "c": ("d",)}, "graph")
    ['a', 'b', 'c', 'd']
    """
    graph = TopologicalSorter[str](dict.fromkeys(nodes, ()))
    for node, consumers in edges.items():
        for consumer in consumers:
            graph.add(consumer, node)
    try:
        graph.prepare()
    except CycleError as error:
        raise BadInput(
            f"{where}: the graph has a cycle, {cycle_text(error.args[1])}; a pipeline needs a "
            f"graph without cycles; remove one of these edges"
        ) from None
    ready, order = [*reversed(graph.get_ready())], list[str]()
    while ready:
        order.append(ready.pop())
        graph.done(order[-1])
        ready += reversed(graph.get_ready())
    return order


def cycle_text(cycle: Sequence[str]) -> str:
    """A cycle from its first node by name; of a long one, only a part.

    >>> cycle_text(["b", "a", "b"])
    'a -> b -> a'
    """
    first = cycle.index(min(cycle))
    around = [*cycle[first:-1], *cycle[: first + 1]]
    shown = around if len(around) <= 9 else [*around[:7], f"... ({len(around) - 1} nodes)"]
    return " -> ".join(shown)
