"""A tournament tree that finds the source of the next event; compiled by numba.

The sources are the leaves. Each inner node holds the earliest time of its eight children, so the
root holds the time of the next event. Eight times fit in one cache line.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

__all__ = ["ROOT", "appoint", "finish_acting", "next_source"]

ROOT = 7
"""Place of the root of the tournament: the eight below place p start at 8 (p - 6), on one line."""


def appoint(state, source, time_s):
    """Set the next event of ``source`` to ``time_s``, instead of any earlier setting."""
    place = state.first_leaf + source
    before = state.next_s[place]
    state.next_s[place] = time_s
    if source == state.acting:
        return
    while place > ROOT:
        place = (place >> 3) + 6
        above = state.next_s[place]
        if time_s < above:
            state.next_s[place] = time_s
        elif before == above:
            time_s = earliest_below(state.next_s, place)
            state.next_s[place] = time_s
        else:
            break
        before = above


def earliest_below(next_s, place):
    """The earliest time of the eight children of a node."""
    k = 8 * (place - 6)
    a, b = min(next_s[k], next_s[k + 1]), min(next_s[k + 2], next_s[k + 3])
    c, d = min(next_s[k + 4], next_s[k + 5]), min(next_s[k + 6], next_s[k + 7])
    return min(min(a, b), min(c, d))


def finish_acting(state):
    """Update the nodes above the source that has just acted; until now they held its old time.

    Times set meanwhile could not propagate past these nodes, so one update corrects all.
    """
    place = state.first_leaf + state.acting
    while place > ROOT:
        place = (place >> 3) + 6
        state.next_s[place] = earliest_below(state.next_s, place)
    state.acting = -1


def next_source(state):
    """The source that acts next; among equal times, the one with the lowest number."""
    leaves, place, time_s = state.first_leaf, ROOT, state.next_s[ROOT]
    while place < leaves:
        below = 8 * (place - 6)
        chosen = 7
        for k in range(6, -1, -1):
            chosen = k if state.next_s[below + k] == time_s else chosen
        place = below + chosen
    return place - leaves
