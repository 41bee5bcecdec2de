"""Least times of a micro-batch from a stage of a relaxed plan through all later ones and back."""

import numpy as np
from numpy.typing import NDArray

from penstock.bounds.messages import first_row_s, message_s, messages_at
from penstock.bounds.steps import (
    WIDTHS,
    Chain,
    Offers,
    Table,
    are_left,
    fill_own,
    keeps_to,
    least_rows,
    width_of,
)
from penstock.plan.run_tables import Floats

__all__ = ["KINDS", "LAST", "LONG", "MEAN", "ROW", "UNSENT", "trips_below"]

Integers = NDArray[np.int64]

MEAN, FIRST, UNSENT, ROW, LAST, DOWN, LONG, KINDS = 0, 1, 2, 3, 4, 5, 6, 12
"""Kinds of times of `trips_below`; the same again after stages of more than one layer."""


def trips_below(
    below: Floats,
    table: Table,
    offers: Offers,
    left: Integers,
    most_used: Integers,
    chain: Chain,
    question: Floats,
    limit_s: float,
) -> None:
    """Fill ``below[kind, lo, state, width]``: least times through layers from ``lo`` on and back.

    On devices that are left in ``state``, after a stage of that width, in stages that by
    themselves stay within ``limit_s``; infinite where there are none. Kinds: the mean over rows
    (`MEAN`), the least of any row of the first micro-batch (`FIRST`), until any gradient can be
    sent to the stage before (`UNSENT`), the least of any row where others may have gone before it
    (`ROW`), until any replica goes on after whatever row is the last to leave the others (`LAST`),
    and until the last stage has done a backward (`DOWN`). Each after a stage of a single layer, and
    then (`LONG`) after a longer one. Where ``question`` says so, all but the mean are left at 0.
    """
    (runs, entries), (offsets, taken, figures, _) = table, offers
    times, layers, states = chain[0], chain[0].shape[1] - 1, left.shape[0]
    ends, count, own = np.empty(layers, dtype=np.int64), 0, np.empty(4)
    seconds, hops = np.empty((layers, 4)), np.zeros((WIDTHS, 2, 3, 6))
    below[:] = np.inf
    if question[9] > 0:
        below[:] = 0.0
        below[MEAN], below[LONG + MEAN] = np.inf, np.inf
    below[:, layers] = 0.0
    for lo in range(layers - 1, 0, -1):
        for option in range(offsets.shape[0]):
            replicas = int(figures[option, 8])
            count = 0
            first, before = runs[option, lo, 0], runs[option, lo, 2] - runs[option, lo, 0]
            for hi in range(first, runs[option, lo, 1]):
                fill_own(own, times, lo, hi)
                entry = entries[before + hi]
                whole_s = (own[0] + own[2]) * figures[option, 2]
                whole_s += (own[1] + own[3]) * figures[option, 0]
                if question[0] * whole_s > limit_s:
                    break
                if keeps_to(limit_s, entry, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0):
                    fewest = least_rows(
                        own,
                        entry,
                        chain[5][:, lo, hi],
                        figures[option],
                        question,
                        limit_s,
                        0.0,
                        0.0,
                    )
                    ends[count], seconds[count, 0], seconds[count, 2] = hi, whole_s, fewest
                    forward_s, backward_s = own[0] + own[1] * fewest, own[2] + own[3] * fewest
                    seconds[count, 1] = (forward_s + backward_s) * figures[option, 2]
                    seconds[count, 3] = forward_s * figures[option, 2]
                    count += 1
            if count == 0:
                continue
            fewest, most_senders = seconds[:count, 2].min(), 0
            for width in range(WIDTHS - 1):
                fill_hops(hops[width], lo, 1 << width, replicas, fewest, chain, question)
            for state in range(states - offsets[option]):
                if not are_left(taken, option, left, state):
                    continue
                # A stage has no more replicas than a micro-batch rows.
                senders = max(1, int(min(most_used[state], question[1])))
                if senders != most_senders:
                    most_senders = senders
                    fill_hops(hops[WIDTHS - 1], lo, senders, replicas, fewest, chain, question)
                onto = (lo, state, state + offsets[option], width_of(replicas))
                if question[9] > 0:
                    lower_means(below, onto, ends[:count], seconds, hops, chain)
                else:
                    lower_below(below, onto, ends[:count], seconds, hops, chain)


def fill_hops(
    hops: Floats,
    lo: int,
    senders: int,
    replicas: int,
    fewest: float,
    chain: Chain,
    question: Floats,
) -> None:
    """Fill in the messages before a stage, ``hops[longer, far, kind]``, between so many replicas.

    ``longer``: whether the stage before has several layers; ``far``: whether only the surest tensor
    is read; kinds as in `lower_below`.
    """
    rows, latency_s, s_per_byte, pairs = question[1], question[2], question[3], chain[4]
    for longer in range(2):
        for far in range(2):
            near = chain[1][1 if longer == 1 and far == 0 else 0]
            _, _, both_s, _ = messages_at(
                near, lo, senders, replicas, rows, 0, latency_s, s_per_byte, pairs
            )
            hop = hops[longer, far]
            hop[0] = both_s
            if question[9] > 0:
                continue
            down_s, back_s = first_row_s(
                near, lo, senders, replicas, fewest, rows, latency_s, s_per_byte, pairs
            )
            alone = 1 if senders == replicas == 1 else 2
            _, single_s = first_row_s(
                near, lo, senders, alone, 1.0, rows, latency_s, s_per_byte, pairs
            )
            one_s = message_s(near[0, lo], rows if senders == 1 else 1.0, latency_s, s_per_byte)
            up_rows = rows if senders == 1 else fewest
            last_s = one_s + message_s(near[1, lo], up_rows, latency_s, s_per_byte)
            hop[1], hop[2], hop[3] = back_s, single_s, max(single_s, last_s)
            hop[4], hop[5] = down_s, down_s


def lower_means(
    below: Floats,
    onto: tuple[int, int, int, int],
    ends: Integers,
    seconds: Floats,
    hops: Floats,
    chain: Chain,
) -> None:
    """`lower_below` of the means alone, with the surest tensor alone."""
    lo, state, target, into = onto
    reader, least_s, far_s = chain[2], np.inf, np.inf
    for k in range(ends.shape[0]):
        through_s = seconds[k, 0] + below[MEAN, ends[k], target, into]
        if reader[0, lo] < ends[k]:
            least_s = min(least_s, through_s)
        else:
            far_s = min(far_s, through_s)
    for width in range(WIDTHS):
        least = min(least_s + hops[width, 0, 1, 0], far_s, below[MEAN, lo, state, width])
        below[MEAN, lo, state, width] = least
        below[LONG + MEAN, lo, state, width] = least


def lower_below(
    below: Floats,
    onto: tuple[int, int, int, int],
    ends: Integers,
    seconds: Floats,
    hops: Floats,
    chain: Chain,
) -> None:
    """Lower the times of `trips_below` to those of stages on one option of devices.

    ``onto``: the first layer, the states before and after, and the width of the stages, which end
    at ``ends``; ``seconds``: of the mean row and of the thinnest replica, how many rows that has,
    and its forward; ``hops``: `fill_hops` after every width.
    """
    lo, state, target, into = onto
    reader, layers, last_reader = chain[2], chain[0].shape[1] - 1, chain[3][1, lo]
    # By what they read of the stage before: all that is near, the surest tensor, or nothing. Kinds:
    # mean, first, row, last, unsent, down.
    least = np.full((3, 6), np.inf)
    for k in range(ends.shape[0]):
        end, far = ends[k], 2
        if reader[0, lo] < end:
            far = 0 if reader[1, lo] < end else 1
        kind = LONG if end - lo > 1 else 0
        after, through = below[kind : kind + LONG, end, target, into], least[far]
        through[0] = min(through[0], seconds[k, 0] + after[MEAN])
        through[1] = min(through[1], seconds[k, 1] + after[FIRST])
        through[2] = min(through[2], seconds[k, 1] + after[ROW])
        through[3] = min(through[3], seconds[k, 1] + after[LAST])
        # Of a tensor that is read further down, a gradient may come straight from there.
        unsent_s = seconds[k, 1] + after[FIRST]
        if last_reader >= end:
            unsent_s = seconds[k, 3] + (after[UNSENT] if last_reader == end else after[DOWN])
        through[4] = min(through[4], unsent_s)
        down_s = seconds[k, 3] + after[DOWN] if end < layers else seconds[k, 1]
        through[5] = min(through[5], down_s)
    for far in range(3):
        if least[far, 0] == np.inf:
            continue
        for width in range(WIDTHS):
            for longer in range(2):
                hop = hops[width, longer, far]
                place = below[LONG * longer : LONG * longer + LONG, lo, state, width]
                mean_s, first_s = least[far, 0] + hop[0], least[far, 1] + hop[1]
                # A single device before them waits for all rows.
                place[MEAN] = min(place[MEAN], max(mean_s, first_s) if width == 0 else mean_s)
                place[FIRST] = min(place[FIRST], first_s)
                place[ROW] = min(place[ROW], least[far, 2] + hop[2])
                place[LAST] = min(place[LAST], least[far, 3] + hop[3])
                place[UNSENT] = min(place[UNSENT], least[far, 4] + hop[4])
                place[DOWN] = min(place[DOWN], least[far, 5] + hop[5])
