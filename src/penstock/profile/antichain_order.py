"""Turns a graph of operators into a chain whose contiguous runs make sensible stages."""

from collections.abc import Iterable, Mapping

from penstock.errors import BadInput

__all__ = ["chain_order"]


def chain_order(
    nodes: Iterable[str], edges: Mapping[str, tuple[str, ...]], where: str
) -> list[str]:
    """A topological order of ``nodes`` that finishes each branch before it starts another.

    ``edges[node]`` are the nodes that read ``node``. Among the ready nodes, the one whose producer
    came last goes first. So tensors are read soon, and few cross a cut. Ties keep the order of
    ``nodes``.

    >>> chain_order("abcd", {"a": ("b", "c"), "b": ("d",), "c": ("d",)}, "graph")
    ['a', 'b', 'c', 'd']

    Raises:
        BadInput: the graph has a cycle; ``where`` names the file.
    """
    waiting: dict[str, int] = {node: 0 for node in nodes}
    for consumers in edges.values():
        for consumer in consumers:
            waiting[consumer] += 1
    ready = [node for node in reversed(waiting) if waiting[node] == 0]
    order: list[str] = []
    while ready:
        node = ready.pop()
        order.append(node)
        freed: list[str] = []
        for consumer in edges.get(node, ()):
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                freed.append(consumer)
        ready += reversed(freed)
    if len(order) < len(waiting):
        raise BadInput(
            f"{where}: the graph has a cycle, {cycle_text(set(waiting) - set(order), edges)}; a "
            f"pipeline needs a graph without cycles; remove one of these edges"
        )
    return order


def cycle_text(stuck: set[str], edges: Mapping[str, tuple[str, ...]]) -> str:
    """A cycle among nodes each of which waits for another one.

    >>> cycle_text({"a", "b", "c"}, {"a": ("b",), "b": ("a", "c")})
    'a -> b -> a'
    """
    producer = {
        consumer: node
        for node in sorted(stuck)
        for consumer in edges.get(node, ())
        if consumer in stuck
    }
    place: dict[str, int] = {}
    walk = [min(stuck)]
    while walk[-1] not in place:
        place[walk[-1]] = len(walk) - 1
        walk.append(producer[walk[-1]])
    cycle = list(reversed(walk[place[walk[-1]] :]))
    first = cycle.index(min(cycle))
    around = [*cycle[first:-1], *cycle[: first + 1]]
    shown = around if len(around) <= 9 else [*around[:7], f"... ({len(around) - 1} nodes)"]
    return " -> ".join(shown)
