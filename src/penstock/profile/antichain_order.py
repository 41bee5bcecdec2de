"""A graph of operators as a chain: an order in which contiguous runs are sensible stages."""

from collections.abc import Iterable, Mapping

from penstock.errors import BadInput

__all__ = ["chain_order"]


def chain_order(
    nodes: Iterable[str], edges: Mapping[str, tuple[str, ...]], where: str
) -> list[str]:
    """A topological order of ``nodes`` that finishes each branch before it starts another.

    ``edges[node]`` are the nodes that read ``node``. Among the nodes that are ready, the one whose
    producer came last goes first, so that tensors are read soon and few cross a cut; ties keep the
    order of ``nodes``.

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
        stuck = next(node for node in waiting if waiting[node] > 0 and node not in order)
        raise BadInput(
            f"{where}: the graph has a cycle through node '{stuck}'; a pipeline needs a graph "
            f"without cycles"
        )
    return order
