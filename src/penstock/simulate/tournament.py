"""Which source of events acts next: a tournament, compiled by numba.

The sources are the leaves of a tree; each inner node knows the earliest time of its eight, so the
next event is at the root, and a new time climbs up. Eight, because they stand side by side in the
processor's cache.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from penstock.simulate.layout import ACTING, FIRST_LEAF, NEXT

__all__ = ["ROOT", "appoint", "finish_acting", "next_source"]

ROOT = 7
"""Place of the root of the tournament: the eight below place p start at 8 (p - 6), on one line."""


def appoint(w, x, source, time_s):
    """Let ``source`` act at ``time_s`` instead of any earlier appointment."""
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
    """The earliest of the eight below a node."""
    below = first + 8 * (place - 6)
    a, b = min(x[below], x[below + 1]), min(x[below + 2], x[below + 3])
    c, d = min(x[below + 4], x[below + 5]), min(x[below + 6], x[below + 7])
    return min(min(a, b), min(c, d))


def finish_acting(w, x):
    """Bring the nodes above the source that has acted up to date: till now they held its time.

    Whoever was appointed meanwhile could not climb past them, so one climb corrects all.
    """
    first = w[NEXT]
    place = w[FIRST_LEAF] + w[ACTING]
    while place > ROOT:
        place = (place >> 3) + 6
        x[first + place] = earliest_below(x, first, place)
    w[ACTING] = -1


def next_source(w, x):
    """The source that acts next; of several at the same time the one numbered lowest."""
    first, leaves = w[NEXT], w[FIRST_LEAF]
    place, time_s = ROOT, x[w[NEXT] + ROOT]
    while place < leaves:
        below = 8 * (place - 6)
        chosen = 7
        for k in range(6, -1, -1):
            chosen = k if x[first + below + k] == time_s else chosen
        place = below + chosen
    return place - leaves
