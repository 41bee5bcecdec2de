"""What a stage of a relaxed plan adds to what is known of those before it."""

import numpy as np
from numpy.typing import NDArray

from penstock.bounds.messages import message_s, messages_at
from penstock.bounds.steps import (
    HUB,
    Chain,
    Table,
    fill_own,
    insert,
    keeps_to,
    least_rows,
    width_of,
)
from penstock.bounds.traffic import one_way_s, traffic_s
from penstock.bounds.trips import LAST, LONG, MEAN, ROW, UNSENT
from penstock.kernels import copy_into
from penstock.plan.run_tables import Floats

__all__ = ["Fronts", "add_stages"]

Integers = NDArray[np.int64]

Fronts = tuple[Integers, Floats, Integers]
"""How many points each front has, the points, and the point and option that each came from."""

Starts = tuple[float, float, float, float, float, float]
"""A, A + W, W, a and w of `headroom` of a stage, and when the last forward before it has come."""

Arrival = tuple[float, float, float, float, float]
"""What `arrival` returns."""

Each = tuple[float, float, float]
"""Forward and backward of the mean row, and the fewest rows of a replica."""


def arrival(
    reached: Floats,
    cut: int,
    link: tuple[int, float, float],
    senders: int,
    replicas: int,
    near: Floats,
    pairs: Floats,
    rows: float,
) -> tuple[float, float, float, float, float]:
    """A, A + W and W of `headroom` for a stage that reads ``near``, and the message of one row.

    And the seconds of all rows of a micro-batch through a port between hosts. ``link``: whether
    it leads to another host, its latency and seconds per byte.
    """
    crossing, latency_s, s_per_byte = link
    down_s, up_s, both_s, port_s = messages_at(
        near, cut, senders, replicas, rows, crossing, latency_s, s_per_byte, pairs
    )
    # Some message may be of a single row.
    thin_rows = rows if senders == replicas == 1 else 1.0
    row_s = message_s(near[0, cut], thin_rows, latency_s, s_per_byte)
    first_s, drain_s = reached[0] + down_s, reached[4] + up_s
    if replicas == 1:
        # A single device takes in all rows, one after the other.
        all_s = message_s(near[0, cut], rows, latency_s, s_per_byte)
        first_s = max(first_s, reached[2] + all_s)
    trip_s = max(reached[1] + both_s, first_s + drain_s)
    return first_s, trip_s, drain_s, row_s, port_s


def arrivals(
    reached: Floats,
    lo: int,
    link: tuple[int, float, float],
    senders: int,
    replicas: int,
    near: Floats,
    pairs: Floats,
    rows: float,
) -> tuple[Arrival, Arrival, Arrival]:
    """`arrival` of stages that read nothing of the stage before, the surest tensor, or all near."""
    apart = (reached[0], reached[1], reached[4], 0.0, 0.0)
    surest, joint = apart, apart
    if lo > 0:
        surest = arrival(reached, lo, link, senders, replicas, near[0], pairs, rows)
        joint = surest
        if reached[9] > 0:
            joint = arrival(reached, lo, link, senders, replicas, near[1], pairs, rows)
    return apart, surest, joint


def thin_arrival(
    reached: Floats,
    lo: int,
    is_read: bool,
    row_s: float,
    fewest: float,
    link: tuple[int, float, float],
    message: Floats,
) -> tuple[float, float, float]:
    """a of `headroom`, when the last forward of the stage before can have come, and w.

    A replica needs all its rows, ``fewest`` at least, and sends all of them, one after the other.
    """
    if not is_read:
        return reached[2] + row_s, reached[5] + row_s, reached[3]
    return (
        reached[2] + message_s(message[0, lo], fewest, link[1], link[2]),
        reached[5] + message_s(message[0, lo], reached[10], link[1], link[2]),
        reached[3] + message_s(message[1, lo], fewest, link[1], link[2]),
    )


def pace_of(
    before_s: float,
    is_read_alone: bool,
    cut: int,
    link: tuple[int, float, float],
    near: Floats,
    rows: float,
    forward_s: float,
) -> float:
    """At least so many seconds lie between forwards on a device, once the stages before it work.

    As many as the slowest forward takes of any stage so far (``before_s`` before this one), or the
    message that a device takes in for each, where a single one reads it.
    """
    pace_s = max(before_s, forward_s)
    if is_read_alone:
        pace_s = max(pace_s, message_s(near[0, cut], rows, link[1], link[2]))
    return pace_s


def until_drained_s(
    batches: float, forward_s: float, whole_s: float, below_s: float, late_s: float, pace_s: float
) -> float:
    """Least seconds of a device from its first forward to its last backward, for want of gradients.

    Until ``below_s`` after its first forward it has nothing but forwards to compute, and no more
    of these than the stages before it have passed on: the k-th starts no sooner than ``(k - 1) *
    pace_s`` after the first could, ``late_s`` before the first does. All other work follows.
    """
    ready = batches
    if pace_s > 0:
        ready = min(batches, 1 + (late_s + below_s) / pace_s)
    return forward_s + below_s + batches * whole_s - ready * forward_s


def last_forward_s(
    first_s: float,
    forward_s: float,
    backward_s: float,
    again_s: float,
    below_s: float,
    batches: float,
    depth: float,
) -> float:
    """When a replica has done its last forward at the earliest, with ``depth`` at once in memory.

    Before it starts, all but ``depth`` micro-batches have come back: their backwards are done (each
    with ``again_s`` more for recompute), and each was held for its round trip (Little's law).
    """
    returned = max(0.0, batches - depth)
    done_s = batches * forward_s + returned * (backward_s + again_s)
    held_s = returned / depth * (forward_s + backward_s + below_s) + forward_s
    return first_s + max(done_s, held_s)


def hub_loads(
    loads: Floats,
    reached: Floats,
    lo: int,
    hi: int,
    producer: int,
    reader: Integers,
    size: Floats,
    once: tuple[float, float, float, float, float, float],
    figures: Floats,
    question: Floats,
) -> bool:
    """Fill in what the stage of the tensor with many readers sends and takes in for them.

    It sends the tensor once to each stage that reads it, through the same engines as all else, and
    takes as many gradients in. ``once``: with a single reader, until when it has sent all and
    reduced its gradients, has sent all activations, and has taken in all gradients and done what
    follows; of the mean replica, then of the fullest. Stages from ``lo`` to ``hi`` follow. Loads:
    until when for no reader, of each of the three, then for how long for each reader, of
    activations and of gradients. Whether the stage reads the tensor, or makes it.
    """
    layers = reader.shape[0] - 1
    copy_into(loads, reached[HUB : HUB + 5])
    if hi <= producer:
        loads[:] = 0.0
        return False
    if lo > producer:
        if reader[lo] >= hi:
            return False
        loads[0] += loads[3]
        loads[1] += loads[3]
        loads[2] += loads[4]
        return True
    loads[:] = 0.0
    if reader[hi] >= layers:
        return False
    batches, rows, latency_s, full = question[0], question[1], question[2], figures[3]
    loads[3] = batches * traffic_s(size[0], rows, latency_s, figures[10], figures[6])
    loads[4] = batches * traffic_s(size[1], rows, latency_s, figures[9], figures[5])
    full_s = batches * traffic_s(size[0], full, latency_s, figures[10], figures[10])
    fullest = full_s > loads[3] * (1 + 1e-9)
    if fullest:
        # The fullest replica has more of it than the mean, for each reader.
        loads[3] = full_s
        loads[4] = batches * traffic_s(size[1], full, latency_s, figures[9], figures[9])
    for k in range(3):
        loads[k] = (once[3 + k] if fullest else once[k]) - loads[3 if k < 2 else 4]
    return True


def fill_point(
    point: Floats,
    reached: Floats,
    ends: tuple[int, int],
    starts: Starts,
    each: Each,
    own: Floats,
    entry: Floats,
    carried: Floats,
    trips: Floats,
    figures: Floats,
    passing: Integers,
    hub: tuple[Integers, Floats],
    question: Floats,
    limit_s: float,
) -> bool:
    """Fill in the point after a stage; whether its gradients and the hub's messages keep to a time.

    ``point[5]``: the last forward, as far as memory has no part in it.
    """
    lo, hi = ends
    first_s, trip_s, drain_s, thin_s, last_s, passed_s = starts
    forward_s, backward_s, fewest = each
    batches, layers, per_speed = question[0], passing.shape[1] - 1, figures[2]
    thin_forward_s = (own[0] + own[1] * fewest) * per_speed
    full_forward_s = (own[0] + own[1] * figures[3]) * per_speed
    full_back_s = (own[2] + own[3] * figures[3]) * per_speed
    after_s = max(entry[9], backward_s + drain_s)
    thin_after_s = max(entry[10], (own[2] + own[3] * fewest) * per_speed + last_s)
    if entry[16] > 0:
        row_s = (carried[2, 1] - carried[3, 1]) / figures[10]
        thin_after_s = max(thin_after_s, entry[16] + fewest * row_s)
    in_s, back_in_s, full_back_in_s, out_s, full_out_s = one_way_s(carried, figures, question)
    # No gradient comes in before a micro-batch has been down and back.
    back_s = thin_s + thin_forward_s + trips[UNSENT]
    taken_s = back_s + back_in_s + after_s
    full_taken_s = back_s + full_back_in_s + max(entry[10], full_back_s + last_s)
    if hi < layers and max(taken_s, full_taken_s) > limit_s:
        return False
    sent_s, full_sent_s = first_s + forward_s + out_s, thin_s + full_forward_s + full_out_s
    once = (first_s + entry[14], sent_s, taken_s, thin_s + entry[15], full_sent_s, full_taken_s)
    loads, producer, reads = point[HUB:], int(question[8]), False
    if producer >= 0:
        reads = hub_loads(loads, reached, lo, hi, producer, hub[0], hub[1], once, figures, question)
        if max(loads[0], loads[2]) > limit_s:
            return False
    # The last forward follows that of the stage before, and all activations that come in.
    # They may come straight from earlier stages, unless none is made before the one that is known.
    known = 2 if reached[9] > 0 else 1
    passed_s = max(passed_s, (reached[2] if passing[2, lo] >= lo - known else 0.0) + in_s)
    if hi == layers or passing[0, lo] < hi:
        passed_s = max(passed_s, reached[6])
        if reads and lo > producer:
            passed_s = max(passed_s, loads[1])
    point[0] = first_s + forward_s
    point[1] = point[0] + max(entry[9], backward_s + trip_s - first_s)
    point[2] = thin_s + thin_forward_s
    point[3] = thin_after_s
    point[4] = after_s
    point[5] = max(passed_s + thin_forward_s, first_s + batches * forward_s)
    point[6] = max(reached[6], sent_s, full_sent_s)
    point[9] = 1.0 if hi - lo > 1 else 0.0
    point[10] = fewest
    return True


def keeps_in_flight(
    point: Floats,
    again: int,
    starts: Starts,
    each: Each,
    own: Floats,
    entry: Floats,
    trips: Floats,
    figures: Floats,
    question: Floats,
    limit_s: float,
) -> bool:
    """Whether a stage keeps to a time without recompute, or with it (``again`` 0 or 1).

    By the micro-batches that memory has room for: so many that pass take their time, and as the
    last forward waits for others to come back, so does what follows it. Raises ``point[5]`` to it.
    """
    first_s, trip_s, _, thin_s, last_s, _ = starts
    batches, replicas, depth = question[0], figures[8], entry[11 + again]
    if depth <= 0 or (again == 1 and entry[11] >= batches):
        return False
    forward_s, backward_s, below_s = each[0], each[1], trips[MEAN]
    start_s, left_s = first_s, trip_s - first_s
    if figures[7] != replicas or (replicas != 1 and replicas != question[1]):
        # Replicas may differ in rows: then the fullest one, which may be reached quickly.
        forward_s = (own[0] + own[1] * figures[3]) * figures[2]
        backward_s = (own[2] + own[3] * figures[3]) * figures[2]
        start_s, left_s, below_s = thin_s, last_s, trips[ROW]
    again_s = entry[13] if again == 1 else 0.0
    busy_s = max(forward_s + backward_s + again_s, (forward_s + backward_s + below_s) / depth)
    if start_s + left_s + batches * busy_s > limit_s:
        return False
    done_s = last_forward_s(start_s, forward_s, backward_s, again_s, below_s, batches, depth)
    point[5] = max(point[5], done_s)
    if point[5] + trips[LAST] + point[3] > limit_s:
        return False
    if replicas == 1 and point[5] + trips[MEAN] + max(point[3], point[4]) > limit_s:
        return False
    if question[9] > 0:
        # On many devices fronts are kept short.
        point[5], point[6], point[9], point[10] = 0.0, 0.0, 0.0, 1.0
    return True


def add_stages(
    fronts: Fronts,
    below: Floats,
    reached: Floats,
    source: tuple[int, int],
    option: int,
    onto: tuple[int, int],
    link: tuple[int, float, float],
    senders: int,
    table: Table,
    figures: Floats,
    chain: Chain,
    hub: tuple[Integers, Floats],
    question: Floats,
    limit_s: float,
    point: Floats,
) -> bool:
    """Add the points of all stages that start where a point ends; whether one is the last stage.

    ``source``: the index of the point and the layer where it ends, ``onto``: the state and hosts
    after the stage.
    """
    counts, points, parents = fronts
    lo, of_option = source[1], figures[option]
    times, near, reader, passing, pairs, traffic = chain
    batches, rows, replicas, per_speed = question[0], question[1], int(of_option[8]), of_option[2]
    layers, into = times.shape[1] - 1, width_of(replicas)
    apart, surest, joint = arrivals(reached, lo, link, senders, replicas, near, pairs, rows)
    runs, entries = table
    before, own = runs[option, lo, 2] - runs[option, lo, 0], np.empty(4)
    for hi in range(runs[option, lo, 0], runs[option, lo, 1]):
        fill_own(own, times, lo, hi)
        entry = entries[before + hi]
        wide, some = reader[1, lo] < hi, reader[0, lo] < hi
        first_s, trip_s, drain_s, row_s, port_s = joint if wide else surest if some else apart
        if entry[0] > limit_s or reached[2] + reached[3] + batches * port_s > limit_s:
            continue
        forward_s = own[0] * per_speed + own[1] * of_option[0]
        backward_s = own[2] * per_speed + own[3] * of_option[0]
        whole_s = forward_s + backward_s
        if trip_s + batches * whole_s > limit_s:
            break
        trips = below[(LONG if hi - lo > 1 else 0) :, hi, onto[0], into]
        if (hi < layers and question[6] == 1) or trip_s + whole_s + trips[MEAN] > limit_s:
            continue
        carried, before_s, after_s = traffic[:, lo, hi], reached[2], reached[3]
        fewest = least_rows(own, entry, carried, of_option, question, limit_s, before_s, after_s)
        message = near[1 if wide and reached[9] > 0 else 0]
        thin_s, passed_s, last_s = thin_arrival(reached, lo, some, row_s, fewest, link, message)
        if not keeps_to(limit_s, entry, first_s, trip_s, drain_s, reached[2], reached[3], last_s):
            continue
        alone = replicas == 1 and lo > 0 and some
        pace_s = pace_of(reached[7], alone, lo, link, near[0], rows, forward_s)
        late_s = first_s - reached[8] - row_s
        drained_s = until_drained_s(batches, forward_s, whole_s, trips[MEAN], late_s, pace_s)
        if replicas == 1 and trip_s + drained_s > limit_s:
            continue
        starts = (first_s, trip_s, drain_s, thin_s, last_s, passed_s)
        each = (forward_s, backward_s, fewest)
        if not fill_point(
            point, reached, (lo, hi), starts, each, own, entry, carried, trips, of_option, passing,
            hub, question, limit_s,
        ):  # fmt: skip
            continue
        point[7] = pace_s
        point[8] = reached[8] + row_s + (own[0] + own[1] * fewest) * per_speed
        passed_s = point[5]
        for again in range(2):
            point[5] = passed_s
            if not keeps_in_flight(
                point, again, starts, each, own, entry, trips, of_option, question, limit_s
            ):
                continue
            if hi == layers:
                return True
            place = (hi, onto[0], onto[1], into)
            counts[place] = insert(
                points[place], parents[place], counts[place], point, source[0], option
            )
    return False
