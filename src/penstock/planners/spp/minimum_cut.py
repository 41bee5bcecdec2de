"""The global minimum cut of a small dense graph."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np
from numpy.typing import NDArray

__all__ = ["minimum_cut"]

TIE = 1e-9
"""Cuts whose weights differ by less than this part of them are equal."""


def minimum_cut(
    weights: NDArray[np.float64],
    sizes: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which vertices are on one side of a global minimum cut (Stoer and Wagner, 1997).

    ``weights`` is symmetric with a zero diagonal. ``sizes`` is how many devices each vertex has.
    Every phase adds, one by one, the vertex that is tied most strongly to those added before. The
    last vertex alone is one side of a cut; then it is merged into the one before. Of equal cuts,
    the one that divides the devices most evenly is taken, then the first. Otherwise a graph of
    equal links would lose one vertex at a time. The time is cubic in the vertices.
    """
    count = len(weights)
    left = weights.copy()
    held = sizes.copy()
    group = np.zeros((count, count), dtype=np.bool_)
    alive = np.ones(count, dtype=np.bool_)
    for v in range(count):
        group[v, v] = True
    total = sizes.sum()
    best_weight, best_balance = np.inf, -1
    best = group[0].copy()
    for phase in range(count - 1):
        tied = np.zeros(count)
        waiting = alive.copy()
        before, last = -1, -1
        for _ in range(count - phase):
            strongest = -1
            for v in range(count):
                if waiting[v] and (strongest < 0 or tied[v] > tied[strongest]):
                    strongest = v
            waiting[strongest] = False
            before, last = last, strongest
            for v in range(count):
                tied[v] += left[strongest, v] if waiting[v] else 0.0
        weight, balance = tied[last], min(held[last], total - held[last])
        is_less = weight < best_weight * (1 - TIE)
        is_equal = weight <= best_weight * (1 + TIE)
        if best_balance < 0 or is_less or (is_equal and balance > best_balance):
            best_weight, best_balance = weight, balance
            best = group[last].copy()
        for v in range(count):
            left[before, v] += left[last, v]
            left[v, before] = left[before, v]
            group[before, v] |= group[last, v]
        left[before, before] = 0.0
        held[before] += held[last]
        alive[last] = False
    return best
