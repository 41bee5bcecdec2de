"""Least times of a micro-batch from a stage of a relaxed plan through all later ones and back."""

import numpy as np
from numpy.typing import NDArray

from penstock.plan.bound_messages import first_row_s, message_s, messages_at
from penstock.plan.bound_steps import (
    WIDTHS,
    Chain,
    Offers,
    are_left,
    keeps_to,
    least_rows,
    widest_of,
    width_of,
)
from penstock.plan.run_tables import Floats

__all__ = ["KINDS", "LAST", "LONG", "MEAN", "ROW", "UNSENT", "trips_below"]

Integers = NDArray[np.int64]

MEAN, FIRST, UNSENT, ROW, LAST, DOWN, LONG, KINDS = 0, 1, 2, 3, 4, 5, 6, 12
"""Kinds of times of `trips_below`; the same again after stages of more than one layer."""


def trips_below(
    below: Floats,
    table: Floats,
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
    offsets, taken, figures, _ = offers
    times, layers, states = chain[0], chain[0].shape[1] - 1, left.shape[0]
    ends, count = np.empty(layers, dtype=np.int64), 0
    seconds = np.empty((layers, 4))
    below[:] = np.inf
    if question[9] > 0:
        below[:] = 0.0
        below[MEAN], below[LONG + MEAN] = np.inf, np.inf
    below[:, layers] = 0.0
    for lo in range(layers - 1, 0, -1):
        for option in range(offsets.shape[0]):
            replicas = int(figures[option, 8])
            count = 0
            for hi in range(lo + 1, layers + 1):
                own, entry = times[:, hi] - times[:, lo], table[option, lo, hi]
                whole_s = (own[0] + own[2]) * figures[option, 2]
                whole_s += (own[1] + own[3]) * figures[option, 0]
                if question[0] * whole_s > limit_s:
                    break
                if keeps_to(limit_s, entry, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0):
                    fewest = least_rows(
                        question[1],
                        question[0],
                        limit_s,
                        0.0,
                        replicas,
                        own,
                        figures[option, 2],
                        entry,
                    )
                    ends[count], seconds[count, 0], seconds[count, 2] = hi, whole_s, fewest
                    forward_s, backward_s = own[0] + own[1] * fewest, own[2] + own[3] * fewest
                    seconds[count, 1] = (forward_s + backward_s) * figures[option, 2]
                    seconds[count, 3] = forward_s * figures[option, 2]
                    count += 1
            if count == 0:
                continue
            for state in range(states - offsets[option]):
                if are_left(taken, option, left, state):
                    target, senders = state + offsets[option], int(most_used[state])
                    onto = (lo, state, target, senders, replicas)
                    if question[9] > 0:
                        lower_means(below, onto, ends[:count], seconds, chain, question)
                    else:
                        lower_below(below, onto, ends[:count], seconds, chain, question)


def lower_means(
    below: Floats,
    onto: tuple[int, int, int, int, int],
    ends: Integers,
    seconds: Floats,
    chain: Chain,
    question: Floats,
) -> None:
    """`lower_below` of the means alone, with the surest tensor alone."""
    lo, state, target, used, replicas = onto
    _, near, reader, _, pairs = chain
    into, least_s, far_s = width_of(replicas), np.inf, np.inf
    for k in range(ends.shape[0]):
        through_s = seconds[k, 0] + below[MEAN, ends[k], target, into]
        if reader[0, lo] < ends[k]:
            least_s = min(least_s, through_s)
        else:
            far_s = min(far_s, through_s)
    for width in range(WIDTHS):
        senders = widest_of(width, used)
        _, _, both_s, _ = messages_at(
            near[0], lo, senders, replicas, question[1], 0, question[2], question[3], pairs
        )
        least = min(least_s + both_s, far_s, below[MEAN, lo, state, width])
        below[MEAN, lo, state, width] = least
        below[LONG + MEAN, lo, state, width] = least


def lower_below(
    below: Floats,
    onto: tuple[int, int, int, int, int],
    ends: Integers,
    seconds: Floats,
    chain: Chain,
    question: Floats,
) -> None:
    """Lower the times of `trips_below` to those of stages on one option of devices.

    ``onto``: the first layer, the states before and after, the most replicas before and those of
    the stages, which end at ``ends``; ``seconds``: of the mean row and of the thinnest replica, how
    many rows that has, and its forward.
    """
    lo, state, target, used, replicas = onto
    reader, into, layers = chain[2], width_of(replicas), chain[0].shape[1] - 1
    last_reader = chain[3][1, lo]
    # By what they read of the stage before: all that is near, the surest tensor, or nothing.
    least = np.full((3, 6), np.inf)
    fewest = question[1]
    for k in range(ends.shape[0]):
        end, far = ends[k], 2
        if reader[0, lo] < end:
            far = 0 if reader[1, lo] < end else 1
        kind = LONG if end - lo > 1 else 0
        after = below[kind : kind + LONG, end, target, into]
        least[far, 0] = min(least[far, 0], seconds[k, 0] + after[MEAN])
        least[far, 1] = min(least[far, 1], seconds[k, 1] + after[FIRST])
        least[far, 2] = min(least[far, 2], seconds[k, 1] + after[ROW])
        least[far, 3] = min(least[far, 3], seconds[k, 1] + after[LAST])
        # Of a tensor that is read further down, a gradient may come straight from there.
        unsent_s = seconds[k, 1] + after[FIRST]
        if last_reader >= end:
            unsent_s = seconds[k, 3] + (after[UNSENT] if last_reader == end else after[DOWN])
        least[far, 4] = min(least[far, 4], unsent_s)
        down_s = seconds[k, 3] + after[DOWN] if end < layers else seconds[k, 1]
        least[far, 5] = min(least[far, 5], down_s)
        fewest = min(fewest, seconds[k, 2])
    near = chain[1]
    same = (near[0, :, lo] == near[1, :, lo]).all() or not (least[0, 0] < np.inf)
    for width in range(WIDTHS):
        senders, place = widest_of(width, used), below[:, lo, state, width]
        with_messages(place, least, lo, 0, senders, replicas, fewest, chain, question)
        if same:
            place[LONG:] = np.minimum(place[LONG:], place[:LONG])
        else:
            with_messages(place[LONG:], least, lo, 1, senders, replicas, fewest, chain, question)


def with_messages(
    place: Floats,
    least: Floats,
    lo: int,
    longer: int,
    senders: int,
    replicas: int,
    fewest: float,
    chain: Chain,
    question: Floats,
) -> None:
    """Lower one entry of ``below`` to the ``least`` times with the messages before them.

    Of a tensor that is not near (the last row of ``least``) no message is counted.
    """
    rows, latency_s, s_per_byte = question[1], question[2], question[3]
    pairs = chain[4]
    for far in range(3):
        mean_s, first_s, row_s, last_s, unsent_s, all_down_s = least[far]
        if mean_s == np.inf:
            continue
        near = chain[1][1 if longer == 1 and far == 0 else 0]
        if far < 2:
            _, _, both_s, _ = messages_at(
                near, lo, senders, replicas, rows, 0, latency_s, s_per_byte, pairs
            )
            mean_s += both_s
            down_s, back_s = first_row_s(
                near, lo, senders, replicas, fewest, rows, latency_s, s_per_byte, pairs
            )
            alone = 1 if senders == replicas == 1 else 2
            _, single_s = first_row_s(
                near, lo, senders, alone, 1.0, rows, latency_s, s_per_byte, pairs
            )
            unsent_s += down_s
            all_down_s += down_s
            first_s += back_s
            row_s += single_s
            one_s = message_s(near[0, lo], rows if senders == 1 else 1.0, latency_s, s_per_byte)
            up_rows = rows if senders == 1 else fewest
            last_s += max(single_s, one_s + message_s(near[1, lo], up_rows, latency_s, s_per_byte))
        if senders == 1:
            mean_s = max(mean_s, first_s)
        place[MEAN] = min(place[MEAN], mean_s)
        place[FIRST] = min(place[FIRST], first_s)
        place[UNSENT] = min(place[UNSENT], unsent_s)
        place[ROW] = min(place[ROW], row_s)
        place[LAST] = min(place[LAST], last_s)
        place[DOWN] = min(place[DOWN], all_down_s)
