"""A tournament tree that finds the source of the next event; compiled by numba.

The sources are the leaves. Each inner node holds the earliest time of its eight children, so the
root holds the time of the next event. Eight times fit in one cache line.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from penstock.simulate.layout import ACTING, FIRST_LEAF, NEXT

__all__ = ["ROOT", "appoint", "finish_acting", "next_source"]

ROOT = 7
"""Place of the root. The children of place p start at 8 (p - 6), aligned to a cache line."""


def appoint(w, x, source, time_s):
    """Set the next event of ``source`` to ``time_s``, instead of any earlier setting."""
    first = w[NEXT]
    place = w[FIRST_LEAF] + source
    before = x[first + place]
    x[first + place] = time_s
    if source == w[ACTING]:
        return
    while place > ROOT:
        place = (place >> 3) + 6
        above = x[first + place]
        if time_s < above:
            x[first + place] = time_s
        elif before == above:
            time_s = earliest_below(x, first, place)
            x[first + place] = time_s
        else:
            break
        before = above


def earliest_below(x, first, place):
    """The earliest time of the eight children of a node."""
    below = first + 8 * (place - 6)
    a, b = min(x[below], x[below + 1]), min(x[below + 2], x[below + 3])
    c, d = min(x[below + 4], x[below + 5]), min(x[below + 6], x[below + 7])
    return min(min(a, b), min(c, d))


def finish_acting(w, x):
    """Update the nodes above the source that has just acted; until now they held its old time.

    Times set meanwhile could not propagate past these nodes, so one update corrects all.
    """
    first = w[NEXT]
    place = w[FIRST_LEAF] + w[ACTING]
    while place > ROOT:
        place = (place >> 3) + 6
        x[first + place] = earliest_below(x, first, place)
    w[ACTING] = -1


def next_source(w, x):
    """The source that acts next; among equal times, the one with the lowest number."""
    first, leaves = w[NEXT], w[FIRST_LEAF]
    place, time_s = ROOT, x[w[NEXT] + ROOT]
    while place < leaves:
        below = 8 * (place - 6)
        chosen = 7
        for k in range(6, -1, -1):
            chosen = k if x[first + below + k] == time_s else chosen
        place = below + chosen
    return place - leaves
