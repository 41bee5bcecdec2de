"""The tensors that cross a cut of a profile, edge by edge."""

from collections.abc import Iterable

from penstock.profile.model_profile import Edge, ModelProfile


def crossing(profile: ModelProfile) -> tuple[tuple[Edge, ...], ...]:
    """The edges at each cut from a layer before it to one at or after it, in order."""
    found: list[list[Edge]] = [[] for _ in range(len(profile.layers) + 1)]
    for edge in profile.edges:
        for cut in range(edge.producer + 1, edge.consumer + 1):
            found[cut].append(edge)
    return tuple(map(tuple, found))


def first_of_each_tensor(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """The first edge of each tensor; a stage receives a tensor once."""
    kept: dict[tuple[int, str], Edge] = {}
    for edge in edges:
        kept.setdefault(edge.made, edge)
    return tuple(kept.values())
