"""The load of a plan: its seconds if work never waited for a busy resource, compiled by numba.

A plan takes at least as long as its most loaded device, engine or port is busy, between the first
forward that reaches it and the last backward that leaves it. That is quickly computed for any
number of micro-batches. The simulator says how much longer the plan takes.

There are two loads. The first lets every stage work on its own. Orders that are searched for come
near to it. The second is *steady*: all stages keep the pace of the most loaded resource, as they do
with one forward and one backward in turn. So no stage is done before the last micro-batches, and
all all-reduces come at the end.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import NamedTuple

import numpy as np

from penstock.cluster.collectives import BUCKET_BYTES
from penstock.plan.run_tables import Floats, Integers
from penstock.search.stage_costs import cost_of_stage, depths_that_fit, reduce_s, rows_of

__all__ = ["Layout", "LoadKind", "load_s"]

SENT, RECEIVED = 0, 1
"""Rows of the tables of seconds that engines and ports are busy with one micro-batch."""

ONE_STAGE = 3
"""Loads of a stage: computing, receiving and sending."""

DOWN, UP = 0, 1
"""Rows of the table of messages to the next stage, and back."""


class Layout(NamedTuple):
    """The layers and devices of stages, as cuts of the layers and of an order of devices.

        cuts    0        c1            c2      layers       layers c1..c2-1 are stage 1
        starts  0        p1            p2                   on devices order[p1] .. order[p2 - 1]

    ``stages`` has one entry. ``cuts`` and ``starts`` have one entry more than the most stages.
    """

    order: Integers
    cuts: Integers
    starts: Integers
    stages: Integers


class LoadKind(NamedTuple):
    """Whether the load is the `steady` one; and its ``power``.

    The load is a norm of that power of all resources' loads, or their maximum where it is 0. It is
    scaled so that three equal loads, those of a stage alone, are worth one of them. More that are
    equal are worth more: a plan whose resources are all full is slower than its fullest one alone.
    """

    power: float
    steady: bool


class StageSeconds(NamedTuple):
    """Seconds of a micro-batch on each stage, and of all-reduces.

    ``left`` is the part of the all-reduce after the last backward; ``reduced`` is what it occupies
    engines for.
    """

    forward: Floats
    backward: Floats
    left: Floats
    reduced: Floats


class Carried(NamedTuple):
    """Seconds of a micro-batch on engines and ports, and of messages to and from the next stage."""

    engines: Floats
    ports: Floats
    near: Floats


def carry(a, fixed, each, sender, receiver, order, carried):
    """Add one tensor between two stages to the engines and ports; return its longest message.

    ``sender`` and ``receiver`` are the positions where a stage starts and ends, and the rows of its
    replicas.
    """
    longest = 0.0
    if fixed == 0 and each == 0:
        return longest
    i, last_i, rows_i = sender
    j, last_j, rows_j = receiver
    first_i, first_j = i, j
    left_i, left_j = rows_i[0], rows_j[0]
    while i < last_i and j < last_j:
        n = min(left_i, left_j)
        source, target = order[i], order[j]
        seconds = a.latency[source, target] + (fixed + each * n) / a.bandwidth[source, target]
        carried.engines[SENT, i] += seconds
        carried.engines[RECEIVED, j] += seconds
        if a.port[source, target]:
            carried.ports[SENT, a.host[source]] += seconds
            carried.ports[RECEIVED, a.host[target]] += seconds
        longest = max(longest, seconds)
        left_i -= n
        left_j -= n
        if left_i == 0:
            i += 1
            left_i = rows_i[i - first_i] if i < last_i else 0
        if left_j == 0:
            j += 1
            left_j = rows_j[j - first_j] if j < last_j else 0
    return longest


def messages(a, layout, rows, carried):
    """Fill in ``carried`` for all tensors of a micro-batch."""
    order, cuts, starts, stages = layout.order, layout.cuts, layout.starts, layout.stages[0]
    stage_of = np.empty(cuts[stages], dtype=np.int64)
    for s in range(stages):
        for layer in range(cuts[s], cuts[s + 1]):
            stage_of[layer] = s
    last_tensor = last_stage = -1
    for e in range(a.edges.shape[1]):
        s, t = stage_of[a.edges[0, e]], stage_of[a.edges[1, e]]
        if s == t or (a.edges[2, e] == last_tensor and t == last_stage):
            continue
        last_tensor, last_stage = a.edges[2, e], t
        here, there = (starts[s], starts[s + 1], rows[s]), (starts[t], starts[t + 1], rows[t])
        size = a.edge_bytes[:, e]
        down_s = carry(a, size[0], size[1], here, there, order, carried)
        up_s = carry(a, size[2], size[3], there, here, order, carried)
        if t == s + 1:
            carried.near[DOWN, s] += down_s
            carried.near[UP, s] += up_s


def reduced_s(a, costs, lo, hi):
    """Seconds in which the all-reduce of layers ``lo`` to ``hi - 1`` occupies engines."""
    size_bytes = a.parameters[lo, hi]
    count = np.ceil(size_bytes / BUCKET_BYTES)
    return count * reduce_s(costs, size_bytes / count) if count > 0 else 0.0


def busy_s(micro_batches, whole_s, forward_s, below_s, kept, leaner, recompute):
    """Least seconds from the first forward to the last backward within memory (Little's law).

    ``recompute``: 0 never, 1 where it is faster, 2 always. ``kept`` and ``leaner`` are the most
    micro-batches in flight without and with it. Infinite where nothing fits.
    """
    least_s = np.inf
    if recompute < 2 and kept > 0:
        least_s = micro_batches * max(whole_s, (whole_s + below_s) / kept)
    if recompute > 0 and leaner > 0:
        again_s = whole_s + min(forward_s, below_s)
        least_s = min(least_s, micro_batches * max(again_s, (whole_s + below_s) / leaner))
    return least_s


def times_of_stages(a, layout, size, rows):
    """Seconds of each stage; fills in ``rows``, the rows of each stage's replicas."""
    order, cuts, starts, stages = layout.order, layout.cuts, layout.starts, layout.stages[0]
    times = StageSeconds(np.zeros(stages), np.zeros(stages), np.zeros(stages), np.zeros(stages))
    costs = np.zeros((2, 2))
    for s in range(stages):
        first, last = starts[s], starts[s + 1]
        rows_of(a, order, first, last, size, rows[s])
        times.forward[s], times.backward[s], times.left[s] = cost_of_stage(
            a, order, first, last, cuts[s], cuts[s + 1], rows[s], costs
        )
        if last - first > 1:
            times.reduced[s] = reduced_s(a, costs, cuts[s], cuts[s + 1])
    return times


def load_ports(a, layout, times, ports, micro_batches, late_s, loads):
    """Fill in the loads of ports, the last of ``loads``; all-reduces count beyond ``late_s``.

    ``ports`` has the seconds of one micro-batch. An all-reduce uses the ports of hosts where some
    pair of its devices has no link of its own. A half-duplex host has one port for both directions.
    """
    starts, hosts = layout.starts, len(a.host_slots)
    first = len(loads) - 2 * hosts
    reduced_on = np.zeros((2, hosts))
    for s in range(layout.stages[0]):
        if times.reduced[s] > 0 and hosts > 1:
            used = ports_of_group(a, layout.order, starts[s], starts[s + 1])
            for h in range(hosts):
                reduced_on[SENT, h] += used[SENT, h] * times.reduced[s]
                reduced_on[RECEIVED, h] += used[RECEIVED, h] * times.reduced[s]
    for h in range(hosts):
        sent_s, received_s = micro_batches * ports[SENT, h], micro_batches * ports[RECEIVED, h]
        left_s = max(0.0, reduced_on[SENT, h] - late_s)
        more_s = max(0.0, reduced_on[RECEIVED, h] - late_s)
        if a.half_duplex[h]:
            loads[first + 2 * h] = sent_s + received_s + max(left_s, more_s)
        else:
            loads[first + 2 * h] = sent_s + left_s
            loads[first + 2 * h + 1] = received_s + more_s


def ports_of_group(a, order, first, last):
    """1 for each outgoing and incoming port that a ring through these devices uses, else 0."""
    used = np.zeros((2, len(a.host_slots)))
    for k in range(first, last):
        host = a.host[order[k]]
        for other in range(first, last):
            if used[SENT, host] and used[RECEIVED, host]:
                break
            if a.port[order[k], order[other]]:
                used[SENT, host] = 1.0
            if a.port[order[other], order[k]]:
                used[RECEIVED, host] = 1.0
    return used


def norm_s(loads, power):
    """The norm of a power of all loads (`LoadKind`), or the largest where the power is 0."""
    most_s = loads.max()
    if not 0 < most_s < np.inf or power <= 0:
        return most_s
    total = 0.0
    for value in loads:
        total += (value / most_s) ** power
    return most_s * (total / ONE_STAGE) ** (1 / power)


def load_s(a, layout, size, batch, recompute, kind):
    """Seconds of the most loaded resource, or a norm of all (`LoadKind`).

    A steady load also has the way of one micro-batch, and what is left of the latest all-reduce.
    Passing a micro-batch back takes twice as long then, because messages wait for one another.

    ``size`` is the samples of a micro-batch, ``batch`` those of an iteration; ``recompute`` is as
    in `busy_s`. The load is infinite where a stage does not fit or has more replicas than rows.
    """
    order, cuts, starts, stages = layout.order, layout.cuts, layout.starts, layout.stages[0]
    hosts, micro_batches = len(a.host_slots), batch // size
    widest = 0
    for s in range(stages):
        widest = max(widest, starts[s + 1] - starts[s])
    if widest > size:
        return np.inf
    rows = np.zeros((stages, widest), dtype=np.int64)
    times = times_of_stages(a, layout, size, rows)
    carried = Carried(np.zeros((2, len(order))), np.zeros((2, hosts)), np.zeros((2, stages)))
    messages(a, layout, rows, carried)
    engines, near = carried.engines, carried.near
    below_s = np.zeros(stages)
    for s in range(stages - 2, -1, -1):
        trip_s = times.forward[s + 1] + times.backward[s + 1] + near[DOWN, s] + near[UP, s]
        below_s[s] = below_s[s + 1] + trip_s
    first_s = after_s = drain_s = late_s = 0.0
    loads = np.zeros(3 * stages + 2 * hosts)
    for s in range(stages):
        kept, leaner = depths_that_fit(
            a, order, starts[s], starts[s + 1], rows[s], cuts[s], cuts[s + 1], micro_batches
        )
        forward_s, backward_s, tail_s = times.forward[s], times.backward[s], times.left[s]
        computing_s = busy_s(
            micro_batches, forward_s + backward_s, forward_s, below_s[s], kept, leaner, recompute
        )
        arrival_s = first_s - near[DOWN, s - 1] if s > 0 else below_s[0] + forward_s
        left_s = received_s = sent_s = drain_s
        if not kind.steady:
            left_s = max(tail_s, after_s)
            received_s = max(backward_s + left_s, times.reduced[s])
            sent_s = max(times.reduced[s], after_s - near[UP, s - 1] if s > 0 else 0.0)
        sent = received = both = 0.0
        for k in range(starts[s], starts[s + 1]):
            if a.half_duplex[a.host[order[k]]]:
                both = max(both, micro_batches * (engines[SENT, k] + engines[RECEIVED, k]))
            sent = max(sent, micro_batches * engines[SENT, k])
            received = max(received, micro_batches * engines[RECEIVED, k])
        loads[3 * s] = first_s + computing_s + left_s
        loads[3 * s + 1] = arrival_s + received + received_s
        loads[3 * s + 2] = first_s + forward_s + sent + sent_s
        if both > 0:
            # One engine from the first message, in either direction, to the last one.
            from_s = min(arrival_s, first_s + forward_s)
            loads[3 * s + 1] = max(loads[3 * s + 1], from_s + both + min(received_s, sent_s))
        late_s = max(late_s, tail_s - 2 * drain_s) if kind.steady else 0.0
        first_s += forward_s + near[DOWN, s]
        after_s = backward_s + max(tail_s, after_s) + near[UP, s]
        drain_s += backward_s + near[UP, s]
    load_ports(a, layout, times, carried.ports, micro_batches, late_s, loads)
    return norm_s(loads, kind.power) + (below_s[0] + late_s if kind.steady else 0.0)
