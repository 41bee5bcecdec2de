"""Which operators belong to one layer, and which are cheap enough to run on every stage.

    batch -> mask, positions ----+--------+        duplicated: run wherever they are read
    batch -> embed -> h -> view -+-> ...           the view too: ``h`` is what is sent

An operator is *duplicated* in three cases: it is cheap and depends on no parameter; it only
rearranges one tensor; or it expands something small to something large (a position bias plus a
mask). All others are *work*: each belongs to one layer, and its result is sent where it is read.
Operators that only the model's outputs need run when outputs are wanted, and not in training steps.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from penstock.capture.cleaning import CleanGraph
from penstock.capture.operators import (
    facts_of,
    is_check,
    is_grouped,
    is_heavy,
    is_mutation,
    is_pointwise,
    is_random,
    is_view,
    shares_storage,
    tensor_value,
    traced_bytes,
    written_inputs,
)

__all__ = ["Dataflow", "find_dataflow"]

SPREAD_FACTOR = 2
"""A pointwise operator is duplicated if that reduces the bytes to send at least by this factor."""


@dataclass(frozen=True)
class Dataflow:
    """Work in order of execution, and what each node needs that is not duplicated.

    ``needs[node]`` are the work nodes, attributes and batch leaves that ``node`` reads, directly or
    through duplicated nodes. ``after[node]`` are earlier writers to storage that ``node`` reads.
    For an entry ``(lo, hi)`` of ``together`` no cut ``c`` with ``lo < c <= hi`` is allowed: it
    would separate a write from what it writes to. ``trained`` are all nodes that the loss needs,
    that write to a buffer, or that check values.
    """

    clean: CleanGraph
    work: tuple[fx.Node, ...]
    position: Mapping[fx.Node, int]
    needs: Mapping[fx.Node, frozenset[fx.Node]]
    after: Mapping[fx.Node, tuple[fx.Node, ...]]
    together: tuple[tuple[int, int], ...]
    updated: frozenset[str]
    sampled: frozenset[fx.Node]
    trained: frozenset[fx.Node]

    def inputs(self, node: fx.Node) -> Iterable[fx.Node]:
        """What ``node`` reads, and the duplicated writes that must precede it."""
        writes = (w for w in self.after.get(node, ()) if w not in self.position)
        return (*node.all_input_nodes, *writes)


def find_dataflow(clean: CleanGraph) -> Dataflow:
    """The dataflow of a cleaned graph."""
    nodes = list(clean.graph.nodes)
    storages, after = _storages(nodes)
    updated = frozenset(
        str(root.target)
        for root, (_, writers) in storages.items()
        if root.op == "get_attr" and writers
    )
    anchored = _anchored(nodes, storages, after, updated)
    duplicated = _duplicated(nodes, after, anchored, updated)
    trained = _trained(nodes)
    work = tuple(n for n in nodes if n.op == "call_function" and n not in duplicated)
    work = tuple(n for n in work if n in trained)
    work = tuple(n for n in work if n not in clean.found_by_stage)
    position = {node: index for index, node in enumerate(work)}
    needs: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        found: set[fx.Node] = set()
        # Writers that are work are in the layer of what they write to, so they have run by then.
        writes = (w for w in after.get(node, ()) if w not in position)
        for source in (*node.all_input_nodes, *writes):
            if source in position or source.op in ("get_attr", "placeholder"):
                found.add(source)
            else:
                found |= needs[source]
        needs[node] = frozenset() if node in clean.found_by_stage else frozenset(found)
    together = (*_together(storages, position, needs), *_groups(position))
    sampled = _sampled(nodes, clean)
    return Dataflow(clean, work, position, needs, after, together, updated, sampled, trained)


def _trained(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """What the loss needs, and all nodes that write, check or have an effect, with their inputs."""
    pending = [n for n in nodes if n.op == "output" or is_check(n) or is_grouped(n)]
    pending += [n for n in nodes if n.op == "call_function" and is_mutation(n)]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return frozenset(found)


Storages = Mapping[fx.Node, tuple[list[fx.Node], list[fx.Node]]]
"""For each storage that is written, by its first node: the nodes that share it, and the writers."""


def _storages(nodes: Iterable[fx.Node]) -> tuple[Storages, dict[fx.Node, tuple[fx.Node, ...]]]:
    """The nodes that share written storage, and for each reader the writers before it."""
    by_name: dict[str, fx.Node] = {}
    root: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    writers: dict[fx.Node, list[fx.Node]] = {}
    after: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in nodes:
        own = node
        if node.op == "get_attr":
            own = by_name.setdefault(str(node.target), node)
        elif node.op == "call_function" and shares_storage(node) and node.all_input_nodes:
            own = root[node.all_input_nodes[0]]
        earlier = {w for source in node.all_input_nodes for w in writers.get(root[source], ())}
        if earlier:
            after[node] = tuple(w for w in earlier if w is not node)
        for source in written_inputs(node) if node.op == "call_function" else ():
            writers.setdefault(root[source], []).append(node)
        root[node] = own
        members.setdefault(own, []).append(node)
    return {own: (members[own], found) for own, found in writers.items()}, after


def _anchored(
    nodes: Iterable[fx.Node],
    storages: Storages,
    after: Mapping[fx.Node, tuple[fx.Node, ...]],
    updated: Collection[str],
) -> set[fx.Node]:
    """Nodes that must run once, on one stage: those around written storage, and with effects.

    These are all nodes that use an updated buffer; all that share storage which is written with
    something that depends on parameters or random numbers; and calls of a group with the arguments
    that must be in their stage.
    """
    anchored: set[fx.Node] = set()
    for node in nodes:
        if is_grouped(node):
            anchored |= {node, *arguments_beside(node)}
    bound: set[fx.Node] = set()
    for node in nodes:
        inputs = (*node.all_input_nodes, *after.get(node, ()))
        held = _is_parameter(node) or (node.op == "get_attr" and str(node.target) in updated)
        reads = held or any(source in bound for source in inputs)
        if reads or (node.op == "call_function" and (is_random(node) or is_heavy(node))):
            bound.add(node)
    for own, (members, writers) in storages.items():
        if (own.op == "get_attr" and str(own.target) in updated) or bound & set(writers):
            anchored |= {n for n in (*members, *writers) if n.op == "call_function"}
    return anchored


def _duplicated(
    nodes: Iterable[fx.Node],
    after: Mapping[fx.Node, tuple[fx.Node, ...]],
    anchored: Collection[fx.Node],
    updated: Collection[str],
) -> set[fx.Node]:
    free: set[fx.Node] = set()
    views: set[fx.Node] = set()
    for node in nodes:
        inputs = (*node.all_input_nodes, *after.get(node, ()))
        if node.op == "placeholder":
            free.add(node)
        elif node.op == "get_attr":
            if str(node.target) not in updated and not _is_parameter(node):
                free.add(node)
        elif node.op != "call_function" or node in anchored or is_check(node):
            continue
        elif all(n in free for n in inputs) and not is_random(node) and not is_heavy(node):
            free.add(node)
        elif not is_random(node) and _reads_written(node, after, anchored):
            continue
        elif (is_view(node) and not _shrinks(node)) or _spreads(node, free):
            views.add(node)
    return {n for n in free | views if n.op == "call_function"}


def _is_parameter(node: fx.Node) -> bool:
    return bool(node.meta.get("is_parameter"))


def _reads_written(
    node: fx.Node, after: Mapping[fx.Node, tuple[fx.Node, ...]], anchored: Collection[fx.Node]
) -> bool:
    """Whether the node reads storage that work writes, so that it matters when it runs."""
    return any(writer in anchored for writer in after.get(node, ()))


def _shrinks(node: fx.Node) -> bool:
    value, source = tensor_value(node), tensor_value(node.all_input_nodes[0])
    return value is None or source is None or traced_bytes(value) < traced_bytes(source)


def _spreads(node: fx.Node, free: Collection[fx.Node]) -> bool:
    """Whether a pointwise operator has a large result and small inputs that would be sent."""
    value = tensor_value(node)
    if value is None or not is_pointwise(node) or is_random(node):
        return False
    sent = [tensor_value(source) for source in node.all_input_nodes if source not in free]
    total = sum(traced_bytes(tensor) for tensor in sent if tensor is not None)
    return None not in sent and total * SPREAD_FACTOR <= traced_bytes(value)


def arguments_beside(node: fx.Node) -> list[fx.Node]:
    """The arguments of a call that must be made in its stage."""
    facts = facts_of(node)
    if facts is None or not facts.beside_arguments:
        return []
    return [source for source in node.all_input_nodes if source.op == "call_function"]


def _groups(position: Mapping[fx.Node, int]) -> list[tuple[int, int]]:
    """First and last position of operators that must be in one stage because of their effects."""
    spans: dict[str, list[int]] = {}
    for node in position:
        facts = facts_of(node)
        if facts is not None and facts.group:
            beside = (position[source] for source in arguments_beside(node))
            spans.setdefault(facts.group, []).extend((position[node], *beside))
    return [(min(span), max(span)) for span in spans.values() if min(span) < max(span)]


def _together(
    storages: Storages,
    position: Mapping[fx.Node, int],
    needs: Mapping[fx.Node, frozenset[fx.Node]],
) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for own, (members, writers) in storages.items():
        touched = [position[n] for n in (*members, *writers) if n in position]
        if not touched:
            continue
        last = max((position[w] for w in writers if w in position), default=-1)
        if own.op == "get_attr":
            names = {n for n in needs if n.op == "get_attr" and n.target == own.target}
            touched += [position[n] for n in position if needs[n] & names]
            last = max(touched)
        if last > min(touched):
            spans.append((min(touched), last))
    for check in (node for node in position if is_check(node)):
        made = max((position[n] for n in needs[check] if n in position), default=position[check])
        if made < position[check]:
            spans.append((made, position[check]))
    return tuple(spans)


def _sampled(nodes: Iterable[fx.Node], clean: CleanGraph) -> frozenset[fx.Node]:
    """Nodes whose values, not only their sizes, depend on the samples."""
    found: set[fx.Node] = set(clean.leaves)
    for node in nodes:
        if node in clean.found_by_stage:
            continue
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    # A tensor made "like" another uses only its shape.
    return frozenset(found)
