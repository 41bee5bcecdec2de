"""What a stage needs after each way of being reached: the table that the bound's program reads."""

import numpy as np
from numpy.typing import NDArray

from penstock.bounds.traffic import (
    left_over_s,
    received_s,
    sending_s,
)
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.plan.run_tables import Floats

__all__ = ["FIGURES", "QUESTION", "TERMS", "headroom"]

FIGURES = (
    "row_s",
    "slowest_row_s",
    "per_speed",
    "rows_least",
    "memory_bytes",
    "receive_rate",
    "send_rate",
    "replicas",
    "most_replicas",
    "best_receive_rate",
    "best_send_rate",
    "second_receive_rate",
    "second_send_rate",
    "flat_latency_s",
    "flat_s_per_byte",
    "other_latency_s",
    "other_s_per_byte",
)
"""What ``figures`` holds of an option of devices, in this order."""

QUESTION = (
    "micro_batches",
    "rows",
    "latency_s",
    "step_s_per_byte",
    "may_keep",
    "may_recompute",
    "per_fastest",
    "best_row_s",
    "ring_rate",
    "one_engine",
)
"""What ``question`` holds: the best that any device or pair of devices does, and whether messages
and all-reduces share engines everywhere (1 or 0)."""

TERMS = (
    "alone",
    "after_forward",
    "round_trip",
    "after_drain",
    "thin_drain",
    "thin",
    "thin_both",
    "before_thin_drain",
    "sent",
    "tail",
    "reduced",
    "kept",
    "recomputed",
    "again",
    "sent_and_reduced",
    "full_sent_and_reduced",
    "reduced_alone",
)
"""The columns of the table."""

Integers = NDArray[np.int64]


def bucket_s(size_bytes: float, figures: Floats) -> float:
    """Least seconds of one all-reduce of an option; none for one replica."""
    if figures[7] < 2 or size_bytes <= 0:
        return 0.0
    flat_s = figures[13] + figures[14] * size_bytes
    return min(flat_s, figures[15] + figures[16] * size_bytes)


def gradient_tails(
    tail: Floats,
    figures: Floats,
    row_s: float,
    times: Floats,
    parameters: Floats,
    lowest: int,
    last: int,
) -> None:
    """``tail[lo]``: from the start of the last backward of layers ``lo..last-1`` to its last sum.

    For ``lo`` from ``lowest`` on.
    Buckets are filled from the last layer to the first as `penstock.simulate.gradients` does, and
    reduced one after the other, each once the backward has passed all its layers.
    """
    per_speed = figures[2]
    finished = 0.0
    waiting = 0.0
    complete_s = 0.0
    for lo in range(last - 1, lowest - 1, -1):
        backward_s = (times[2, last] - times[2, lo]) * per_speed
        backward_s += (times[3, last] - times[3, lo]) * row_s
        if parameters[lo] > 0:
            waiting += parameters[lo]
            complete_s = backward_s
        if waiting >= BUCKET_BYTES:
            count = np.ceil(waiting / BUCKET_BYTES)
            finished = max(finished, complete_s) + count * bucket_s(waiting / count, figures)
            waiting = 0.0
        whole = finished
        if waiting > 0:
            whole = max(finished, complete_s) + bucket_s(waiting, figures)
        tail[lo] = max(whole, backward_s)


def depth_of(room_bytes: float, once_bytes: float, each_bytes: float, most: float) -> float:
    """How many micro-batches fit: the first needs ``once``, each further one ``each``."""
    slack = room_bytes * 1e-9
    if once_bytes > room_bytes + slack:
        return 0.0
    if each_bytes * most <= room_bytes - once_bytes + slack:
        return most
    return min(most, 1 + np.floor((room_bytes - once_bytes + slack) / each_bytes))


def busy_in_memory_s(
    batches: float,
    whole_s: float,
    below_s: float,
    again_s: float,
    kept: float,
    recomputed: float,
) -> float:
    """Least seconds from the first forward to the last backward of a stage, as memory allows.

    A micro-batch is held from its forward to its backward, at least ``whole_s + below_s``; with
    no more than ``depth`` held at once, all of them take ``M / depth`` times that (Little's law).
    With recompute a micro-batch costs ``again_s`` more: another forward, or to wait for its own
    backward.
    """
    busy_s = np.inf
    if kept > 0:
        busy_s = batches * max(whole_s, (whole_s + below_s) / kept)
    if recomputed > 0:
        each_s = whole_s + again_s
        busy_s = min(busy_s, batches * max(each_s, (whole_s + below_s) / recomputed))
    return busy_s


def stage_tails_s(
    tail_s: float,
    full_tail_s: float,
    own: Floats,
    gradient_bytes: float,
    tied: Floats,
    all_out: Floats,
    out: Floats,
    figures: Floats,
    question: Floats,
) -> tuple[float, float, float, float, float]:
    """From the start of the last backward to the end of the optimizer's step.

    Of the mean replica, of the slowest and of the fullest, and the part that is left whatever the
    backward takes, with the step and without. ``tail_s`` and ``full_tail_s``: `gradient_tails` of
    the mean and the slowest; ``tied``: bytes of tied parameters used elsewhere too, and only here;
    of ``all_out`` what is not in ``out`` leaves after a backward. The last of that and the
    all-reduce need the same engine once the last backward has started.
    """
    most_rows = figures[3]
    backward_s = own[2] * figures[2] + own[3] * figures[0]
    slow_back_s = own[2] * figures[2] + own[3] * figures[1]
    full_back_s = (own[2] + own[3] * most_rows) * figures[2]
    step_s = question[3] * gradient_bytes * figures[2]
    # Gradients of tied parameters wait for the whole backward.
    tied_s = tied[0] / question[8]
    tied_s = max(tied_s, tied[1] / BUCKET_BYTES * bucket_s(BUCKET_BYTES, figures))
    reduce_s = gradient_bytes / BUCKET_BYTES * bucket_s(BUCKET_BYTES, figures)
    mean_s = max(tail_s, backward_s + tied_s) + step_s
    slow_s = max(full_tail_s, slow_back_s + tied_s) + step_s
    full_s = max(full_back_s + tied_s, reduce_s) + step_s
    # The slowest replica is the fullest one where all are equally fast.
    if abs(most_rows * figures[2] - figures[1]) <= 1e-12 * figures[1]:
        full_s = slow_s
    own_s, engine_s = reduce_s + step_s, reduce_s * question[9]
    if engine_s > 0:
        latency_s, best, rate = question[2], figures[10], figures[6]
        mean_s = max(
            mean_s, engine_s + left_over_s(all_out, out, question[1], latency_s, best, rate)
        )
        last_s = engine_s + left_over_s(all_out, out, most_rows, latency_s, best, best)
        slow_s, full_s = max(slow_s, mean_s), max(full_s, last_s)
        own_s = max(own_s, engine_s + left_over_s(all_out, out, 1.0, latency_s, best, best))
    return mean_s, slow_s, full_s, own_s, engine_s


def depths_in_memory(
    held: Floats,
    own: Floats,
    workspace_bytes: float,
    thin_below_s: float,
    figures: Floats,
    question: Floats,
) -> tuple[float, float, float]:
    """How many micro-batches fit, kept and recomputed, and what one more costs with recompute."""
    saved, inputs = held[1] + held[2] * figures[3], held[3] + held[4] * figures[3]
    room = figures[4] - held[0] - workspace_bytes
    again_s = min((own[0] + own[1]) * figures[2], thin_below_s)
    if figures[8] == 1:
        again_s = min(own[0] * figures[2] + own[1] * figures[0], thin_below_s)
    kept = question[4] * depth_of(room, saved, saved, question[0])
    recomputed = question[5] * depth_of(room, saved, min(inputs, saved), question[0])
    return kept, recomputed, again_s


def fill_terms(
    entry: Floats,
    is_first: bool,
    own: Floats,
    below_s: float,
    tails: tuple[float, float, float, float, float],
    depths: tuple[float, float, float],
    received: tuple[float, float, float, float],
    sending: tuple[float, float, float],
    figures: Floats,
    batches: float,
) -> None:
    """Fill the `TERMS` of one run on one option, from its times and those of its messages.

    ``tails``: `stage_tails_s`, ``depths``: `depths_in_memory`, ``received``: `received_s`,
    ``sending``: `sending_s`; ``below_s``: the least time of a micro-batch in the layers after it.
    """
    tail_s, slow_tail_s, full_tail_s, own_s, engine_s = tails
    kept, recomputed, again_s = depths
    in_s, near_s, full_in_s, full_near_s = received
    out_s, all_out_s, full_all_out_s = sending
    forward_s = own[0] * figures[2] + own[1] * figures[0]
    backward_s = own[2] * figures[2] + own[3] * figures[0]
    whole_s = forward_s + backward_s
    slowest_s = (own[0] + own[2]) * figures[2] + (own[1] + own[3]) * figures[1]
    slow_back_s = own[2] * figures[2] + own[3] * figures[1]
    full_back_s = (own[2] + own[3] * figures[3]) * figures[2]
    # The last gradient may leave after the all-reduce, beside the step.
    with_sent_s = own_s if is_first else engine_s
    sent_s = forward_s + batches * all_out_s
    full_sent_s = (own[0] + own[1] * figures[3]) * figures[2] + batches * full_all_out_s
    entry[0] = max(batches * in_s + tail_s, batches * full_in_s + full_tail_s)
    entry[1] = max(batches * whole_s - backward_s + tail_s, sent_s + with_sent_s)
    if is_first:
        entry[1] = max(entry[1], sent_s + tail_s)
    entry[2] = busy_in_memory_s(batches, whole_s, below_s, again_s, kept, recomputed)
    entry[3] = batches * in_s + backward_s
    entry[4] = batches * near_s + backward_s
    entry[5] = max(batches * near_s + tail_s, batches * full_near_s + full_tail_s)
    entry[5] = max(entry[5], batches * slowest_s - slow_back_s + slow_tail_s)
    entry[5] = max(entry[5], full_sent_s + with_sent_s)
    entry[6] = max(batches * slowest_s, batches * full_near_s + full_back_s)
    entry[7] = batches * full_in_s + full_back_s
    entry[8] = max(forward_s + batches * out_s, 0.0)
    entry[9] = tail_s
    entry[10] = own_s
    entry[11], entry[12], entry[13] = kept, recomputed, again_s
    entry[14] = sent_s + with_sent_s
    entry[15] = full_sent_s + with_sent_s
    entry[16] = engine_s


def headroom(
    table: Floats,
    runs: Integers,
    tail: Floats,
    full_tail: Floats,
    figures: Floats,
    times: Floats,
    parameters: Floats,
    workspace: Floats,
    memory: Floats,
    traffic: Floats,
    near: Floats,
    reader: Integers,
    question: Floats,
) -> None:
    """Fill ``table[run, term]`` for the runs of one option of devices.

    ``runs[lo]``: of the runs of layers ``lo..hi-1`` that count the least ``hi``, one past the
    largest, and the place of the first in the table; both ends never fall with ``lo``.

    Of a stage, let A be the mean over rows of the time in which its first forward is reached, W
    that of what follows its last backward (the drain, or the all-reduce of an earlier stage that
    only starts in it), a <= A and w <= W the same of any row at least. Each plan takes at least

        alone,  A + after_forward,  A + W + round_trip,  W + after_drain,  W + a + thin_drain,
        a + thin,  a + w + thin_both,  w + before_thin_drain,  A + w' + sent

    where w' <= w is without the message to the stage before, which ``sent`` has. ``tail``: from
    the start of the last backward to the end of the optimizer's step, ``reduced``: the part of it
    that is left whatever the backward takes. Terms of the fullest replica, which has the most
    rows, know only a and w: its rows may be those that pass other stages quickly.

    ``memory[lo, hi]``: bytes held, saved fixed, saved per sample, inputs fixed, inputs per sample,
    tied parameters used elsewhere too, and only here. ``traffic[kind, lo, hi]``: fixed, per sample,
    tensors; of activations in, gradients in, all out, activations out. ``near[0, cut]`` and
    ``near[1, cut]`` likewise, of activations and gradients. ``question``: see `QUESTION`.
    """
    layers, lowest = times.shape[1] - 1, 0
    for last in range(1, layers + 1):
        while lowest < last and runs[lowest, 1] <= last:
            lowest += 1
        gradient_tails(tail, figures, figures[0], times, parameters[0], lowest, last)
        gradient_tails(full_tail, figures, figures[1], times, parameters[0], lowest, last)
        below = times[:, layers] - times[:, last]
        thin_below_s = (below[0] + below[2] + below[1] + below[3]) * question[6]
        below_s = (below[0] + below[2]) * question[6] + (below[1] + below[3]) * question[7]
        most_workspace = 0.0
        for lo in range(last - 1, lowest - 1, -1):
            own = times[:, last] - times[:, lo]
            most_workspace = max(most_workspace, workspace[0, lo] + workspace[1, lo] * figures[3])
            if last < runs[lo, 0]:
                continue
            entry, held = table[runs[lo, 2] + last - runs[lo, 0]], memory[lo, last]
            size = parameters[1, last] - parameters[1, lo]
            all_out, out = traffic[2, lo, last], traffic[3, lo, last]
            tails = stage_tails_s(
                tail[lo], full_tail[lo], own, size, held[5:], all_out, out, figures, question
            )
            depths = depths_in_memory(held, own, most_workspace, thin_below_s, figures, question)
            is_read = lo > 0 and reader[lo] < last
            down, up = traffic[0, lo, last], traffic[1, lo, last]
            received = received_s(down, up, near[0, lo], is_read, figures, question)
            sending = sending_s(all_out, out, near[1, lo], is_read, figures, question)
            fill_terms(
                entry,
                lo == 0,
                own,
                below_s,
                tails,
                depths,
                received,
                sending,
                figures,
                question[0],
            )
