"""Seconds of a plan by a fast estimate, and hill climbing by it, compiled by numba.

A plan here is a device order with positions where the stages start, and layer cuts:

    cuts    0        c1            c2      layers       layers c1..c2-1 are stage 1
    starts  0        p1            p2                   on devices order[p1] .. order[p2 - 1]

The estimate plays the pipeline stage by stage, not replica by replica: a stage is as slow as its
slowest replica, sends and receives one message at a time, and a micro-batch's message takes as
long as the busiest engine or port that it passes. It differs from the simulator where replicas get
out of step, and where messages of several cuts or all-reduces meet on one port; for the messages
there is a floor, their load in all. The simulator has the last word.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np

from penstock.search.arrays import Integers, SearchArrays
from penstock.search.stage_costs import cost_of_stage, depths_that_fit, rows_of

__all__ = ["estimate"]

FORWARD, BACKWARD, DOWN, UP, TAIL = range(5)
"""Rows of the table of seconds of each stage. ``TAIL``: seconds after its last backward."""


def wire_s(a, sizes, order, at, rows_from, to, rows_to, busy, ports):
    """Seconds of the busiest engine for one micro-batch's tensors between two stages.

    ``sizes``: fixed bytes, bytes of a row, tensors. ``at`` and ``to`` are first and last position
    of sender and receiver; loads of the hosts' ports (0: out, 1: in) are added to ``ports``.
    """
    if sizes[2] == 0:
        return 0.0
    senders, receivers = at[1] - at[0], to[1] - to[0]
    busy[:, : max(senders, receivers)] = 0.0
    before = 0.0
    longest = 0.0
    i = j = 0
    left_i, left_j = rows_from[0], rows_to[0]
    while i < senders and j < receivers:
        n = min(left_i, left_j)
        source, target = order[at[0] + i], order[to[0] + j]
        if n > 0 and source != target:
            size = sizes[0] + sizes[1] * n
            seconds = sizes[2] * a.latency[source, target] + size / a.bandwidth[source, target]
            busy[0, i] += seconds
            busy[1, j] += seconds
            longest = max(longest, max(busy[0, i], busy[1, j]))
            if a.port[source, target]:
                ports[0, a.host[source]] += seconds
                ports[1, a.host[target]] += seconds
                ports[2, a.host[source]] += seconds
                ports[3, a.host[target]] += seconds
                before = max(before, max(ports[2, a.host[source]], ports[3, a.host[target]]))
        left_i -= n
        left_j -= n
        if left_i == 0:
            i += 1
            left_i = rows_from[i] if i < senders else 0
        if left_j == 0:
            j += 1
            left_j = rows_to[j] if j < receivers else 0
    for i in range(senders):
        ports[2, a.host[order[at[0] + i]]] = 0.0
    for j in range(receivers):
        ports[3, a.host[order[to[0] + j]]] = 0.0
    return max(longest, before)


def traffic_of(a, cuts, stages, order, starts, rows, passing, skipping):
    """What passes between stages for one micro-batch.

    ``passing[direction, s]`` becomes fixed bytes, bytes of a row and tensors from stage ``s`` to
    the next (0) or back (1); ``skipping[way, s]`` the seconds that stage ``s`` sends (0) or
    receives (1) to or from stages that are not its neighbours. A tensor goes to a stage once.
    """
    stage_of = np.empty(cuts[stages], dtype=np.int64)
    for s in range(stages):
        stage_of[cuts[s] : cuts[s + 1]] = s
    last_tensor = last_stage = -1
    for e in range(a.edges.shape[1]):
        s, t = stage_of[a.edges[0, e]], stage_of[a.edges[1, e]]
        if s == t or (a.edges[2, e] == last_tensor and t == last_stage):
            continue
        last_tensor, last_stage = a.edges[2, e], t
        for way in range(2):
            fixed, each = a.edge_bytes[2 * way, e], a.edge_bytes[2 * way + 1, e]
            if fixed == 0 and each == 0:
                continue
            if t == s + 1:
                passing[way, s, 0] += fixed
                passing[way, s, 1] += each
                passing[way, s, 2] += 1
                continue
            x, y = order[starts[s]], order[starts[t]]
            if way == 0:
                sent = sending_s(a, fixed, each, rows[s, 0], x, y)
                got = sending_s(a, fixed, each, rows[t, 0], x, y)
            else:
                sent = sending_s(a, fixed, each, rows[s, 0], y, x)
                got = sending_s(a, fixed, each, rows[t, 0], y, x)
            skipping[way, s] += sent
            skipping[1 - way, t] += got


def sending_s(a, fixed, each, rows, source, target):
    """Seconds for the rows of one tensor from one device to another."""
    return a.latency[source, target] + (fixed + each * rows) / a.bandwidth[source, target]


def next_end(seconds, depth, again, now, done, ready, arrived, micro_batches, s):
    """When the next action of stage ``s`` would end, infinite where its input is not on its way."""
    f, b = done[0, s], done[1, s]
    if f < micro_batches and f < b + depth[s]:
        if f >= ready[0, s]:
            return np.inf
        return max(now[s], arrived[0, s, f]) + seconds[FORWARD, s]
    if b < micro_batches and b < ready[1, s]:
        # A recompute does not wait for the gradient.
        return max(now[s] + again[s], arrived[1, s, b]) + seconds[BACKWARD, s]
    return np.inf


def play(seconds, skipping, depth, again, stages, micro_batches):
    """Iteration time of an early-backward pipeline.

    ``seconds`` as `FORWARD`, ...; ``again`` passes before a backward where a stage recomputes.
    Actions are played in the order in which they end, so that messages get the sending engine of
    their stage and the receiving engine of the next first come, first served. ``skipping`` is the
    time that messages to and from further stages hold the engines.
    """
    arrived = np.zeros((2, stages, micro_batches))
    sending, receiving = np.zeros(stages), np.zeros(stages)
    now = np.zeros(stages)
    done = np.zeros((2, stages), dtype=np.int64)
    ready = np.zeros((2, stages), dtype=np.int64)
    ready[0, 0] = micro_batches
    coming = np.empty(stages)
    for s in range(stages):
        coming[s] = next_end(seconds, depth, again, now, done, ready, arrived, micro_batches, s)
    for _ in range(2 * stages * micro_batches):
        s = 0
        for k in range(1, stages):
            if coming[k] < coming[s]:
                s = k
        now[s] = coming[s]
        forward = done[0, s] < micro_batches and done[0, s] < done[1, s] + depth[s]
        way = 0 if forward else 1
        m = done[way, s]
        done[way, s] += 1
        if forward and s + 1 == stages:
            arrived[1, s, m] = now[s]
            ready[1, s] = m + 1
        elif forward or s > 0:
            other = s + 1 if forward else s - 1
            wire = seconds[DOWN, s] if forward else seconds[UP, other]
            start = now[s]
            if wire > 0:
                start = max(start, max(sending[s], receiving[other]))
                sending[s] = start + wire + skipping[0, s] / 2
                receiving[other] = start + wire + skipping[1, other] / 2
            arrived[way, other, m] = start + wire
            ready[way, other] = m + 1
            coming[other] = next_end(
                seconds, depth, again, now, done, ready, arrived, micro_batches, other
            )
        coming[s] = next_end(seconds, depth, again, now, done, ready, arrived, micro_batches, s)
    longest = 0.0
    for s in range(stages):
        longest = max(longest, now[s] + seconds[TAIL, s])
    return longest


def wanted_depth(policy, stages, stage, micro_batches):
    """Micro-batches in flight: 0 as 1F1B, 1 as deep early backward, 2 all of them."""
    if policy == 0:
        return min(stages - stage, micro_batches)
    if policy == 1:
        return min(2 * (stages - stage) - 1, micro_batches)
    return micro_batches


def choose_depths(a, order, cuts, starts, stages, rows, micro_batches, way, depth, recompute):
    """Depth and recompute of every stage; False where one does not fit.

    For ``way`` see `estimate`.
    """
    policy, again, shallow, strict = way
    limit = micro_batches
    for s in range(stages):
        kept, leaner = depths_that_fit(
            a, order, starts[s], starts[s + 1], rows[s], cuts[s], cuts[s + 1], micro_batches
        )
        wanted = min(limit, wanted_depth(policy, stages, s, micro_batches))
        recompute[s] = again == 2 or (again == 1 and kept < wanted and not (shallow and kept > 0))
        deepest = leaner if recompute[s] else kept
        if deepest == 0 or (strict and deepest < wanted):
            return False
        depth[s] = min(wanted, deepest)
        limit = depth[s]
    return True


def message_seconds(a, order, cuts, starts, stages, rows, seconds, skipping):
    """Fill in ``DOWN`` and ``UP``; seconds of a micro-batch on the busiest engine or port."""
    ports = np.zeros((4, len(a.host_slots)))
    busy = np.zeros((2, rows.shape[1]))
    passing = np.zeros((2, stages, 3))
    traffic_of(a, cuts, stages, order, starts, rows, passing, skipping)
    busiest_s = 0.0
    for s in range(stages):
        if s + 1 < stages:
            here, there = (starts[s], starts[s + 1]), (starts[s + 1], starts[s + 2])
            mine, theirs = rows[s], rows[s + 1]
            down, up = passing[0, s], passing[1, s]
            seconds[DOWN, s] = wire_s(a, down, order, here, mine, there, theirs, busy, ports)
            seconds[UP, s] = wire_s(a, up, order, there, theirs, here, mine, busy, ports)
        received = seconds[DOWN, s - 1] + seconds[UP, s] if s > 0 else seconds[UP, s]
        sent = seconds[UP, s - 1] + seconds[DOWN, s] if s > 0 else seconds[DOWN, s]
        busiest_s = max(busiest_s, max(received + skipping[1, s], sent + skipping[0, s]))
    for h in range(len(a.host_slots)):
        busiest_s = max(busiest_s, max(ports[0, h], ports[1, h]))
    return busiest_s


def estimate(
    a: SearchArrays,
    order: Integers,
    cuts: Integers,
    starts: Integers,
    stages: int,
    batch: int,
    micro_batches: int,
    way: tuple[int, int, int, int],
    depth: Integers,
    recompute: Integers,
) -> float:
    """Seconds of an iteration; infinite where a stage does not fit.

    ``way`` is (depth policy, whether recompute is 0 never, 1 where needed, 2 always, whether a
    shallower depth is preferred to a recompute, whether the depth must be as wanted). Writes the
    depth and recompute of each stage.
    """
    widest = 0
    for s in range(stages):
        widest = max(widest, starts[s + 1] - starts[s])
    if widest > batch:
        return np.inf
    rows = np.zeros((stages, widest), dtype=np.int64)
    for s in range(stages):
        rows_of(a, order, starts[s], starts[s + 1], batch, rows[s])
    if not choose_depths(
        a, order, cuts, starts, stages, rows, micro_batches, way, depth, recompute
    ):
        return np.inf
    seconds = np.zeros((5, stages))
    again = np.zeros(stages)
    ways = np.zeros((2, 2))
    for s in range(stages):
        forward_s, backward_s, tail_s = cost_of_stage(
            a, order, starts[s], starts[s + 1], cuts[s], cuts[s + 1], rows[s], ways
        )
        seconds[FORWARD, s], seconds[BACKWARD, s], seconds[TAIL, s] = forward_s, backward_s, tail_s
        again[s] = forward_s if recompute[s] and depth[s] > 1 else 0.0
    skipping = np.zeros((2, stages))
    busiest_s = message_seconds(a, order, cuts, starts, stages, rows, seconds, skipping)
    # Long iterations repeat a period, often that of a full first stage: play two short ones, whole
    # periods apart, and carry their difference on.
    less = max(2 * stages + 4, 300 // stages)
    more = less + max(1, max(stages + 8, 200 // stages) // depth[0]) * depth[0]
    if micro_batches <= 2 * more or depth[0] > less:
        played_s = play(seconds, skipping, depth, again, stages, micro_batches)
    else:
        played_s = play(seconds, skipping, depth, again, stages, more)
        period_s = (played_s - play(seconds, skipping, depth, again, stages, less)) / (more - less)
        played_s += (micro_batches - more) * period_s
    return max(busiest_s * micro_batches, played_s)
