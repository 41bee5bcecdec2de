"""The costs of one stage, compiled by numba: rows, memory, compute, all-reduce.

The rules are those of `penstock.plan.cost` and of the simulator, on the arrays of `SearchArrays`
(always called ``a``). A stage is on positions ``first`` to ``last - 1`` of a device order and has
layers ``lo`` to ``hi - 1``.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np

from penstock.cluster.collectives import BUCKET_BYTES, STATISTIC_BYTES, STATISTICS_S

__all__ = ["cost_of_stage"]


def between(table, lo, hi, rows):
    """A cost of layers ``lo`` to ``hi - 1`` from prefix sums."""
    return table[0, hi] - table[0, lo] + (table[1, hi] - table[1, lo]) * rows


def rows_of(a, order, first, last, batch, rows):
    """Rows of each replica in proportion to speed, as `penstock.plan.row_split.split_rows`."""
    count = last - first
    total = 0.0
    equal = True
    for i in range(count):
        total += a.speed[order[first + i]]
        equal = equal and a.speed[order[first + i]] == a.speed[order[first]]
    if equal:
        for i in range(count):
            rows[i] = batch // count + (1 if i < batch % count else 0)
        return
    spare = batch - count
    wanted = 0.0
    for i in range(count):
        wanted += max(0.0, batch * a.speed[order[first + i]] / total - 1)
    left = spare
    rest = np.empty(count)
    for i in range(count):
        share = max(0.0, batch * a.speed[order[first + i]] / total - 1)
        share = spare * share / wanted if wanted > 0 else 0.0
        rows[i] = 1 + int(share)
        rest[i] = share - int(share)
        left -= int(share)
    while left > 0:
        best = 0
        for i in range(count):
            if rest[i] > rest[best]:
                best = i
        rows[best] += 1
        rest[best] = -1.0
        left -= 1


def crowd(a, order, first, last):
    """By how much the replicas slow one another down on hosts with too few cores."""
    factor = 1.0
    for i in range(first, last):
        slots = a.host_slots[a.host[order[i]]]
        if slots > 0:
            busy = 0
            for j in range(first, last):
                busy += a.host[order[j]] == a.host[order[i]]
            factor = max(factor, busy / slots)
    return factor


def depths_that_fit(a, order, first, last, rows, lo, hi, micro_batches):
    """The most micro-batches in flight that fit without recompute, and with it; 0 for none."""
    held = a.held[lo, hi]
    kept_depth = recompute_depth = micro_batches
    workspace = 0.0
    for i in range(last - first):
        n = rows[i]
        if i == 0 or n != rows[i - 1]:
            workspace = 0.0
            for layer in range(lo, hi):
                workspace = max(workspace, a.workspace[0, layer] + a.workspace[1, layer] * n)
        saved = between(a.saved, lo, hi, n)
        inputs = a.inputs[0, lo, hi] + a.inputs[1, lo, hi] * n
        room = a.memory[order[first + i]] - held - workspace
        if room < saved:
            return 0, 0
        if saved > 0:
            kept_depth = min(kept_depth, int(room / saved))
        if inputs > 0:
            most = int((room - max(saved - inputs, 0.0)) / inputs)
            recompute_depth = min(recompute_depth, max(1, most))
    return kept_depth, recompute_depth


def in_order(devices):
    """The devices sorted by insertion: they nearly are, and numpy's sort takes long to compile."""
    ring = devices.copy()
    for i in range(1, len(ring)):
        device, place = ring[i], i
        while place > 0 and ring[place - 1] > device:
            ring[place] = ring[place - 1]
            place -= 1
        ring[place] = device
    return ring


def all_reduce_costs(a, order, first, last, costs):
    """Latency and seconds a byte of the two algorithms of `cluster.collectives`.

    The ring passes the devices in the order of their numbers. Between explicit links the simulator
    finds the best order, so the ring may be faster there.
    """
    count = last - first
    costs[0, 0] = costs[0, 1] = 0.0
    costs[1, 0] = costs[1, 1] = np.inf
    if count < 2:
        return
    ring = in_order(order[first:last])
    slowest, latency = np.inf, 0.0
    heads = np.empty(count, dtype=np.int64)
    hosts = 0
    inside_latency = inside_rate = chain_latency = chain_rate = 0.0
    alone = True
    for i in range(count):
        here, there = ring[i], ring[(i + 1) % count]
        slowest = min(slowest, a.duplex_bandwidth[here, there])
        latency = max(latency, a.latency[here, there])
        if i == 0 or a.host[here] != a.host[ring[i - 1]]:
            heads[hosts] = here
            hosts += 1
            chain_latency = chain_rate = 0.0
            alone = True
        else:
            chain_latency += a.latency[ring[i - 1], here]
            chain_rate = max(chain_rate, 1 / a.duplex_bandwidth[ring[i - 1], here])
            inside_latency = max(inside_latency, chain_latency)
            # Only devices inside a longer chain send and receive at the same time.
            rate = 1 / a.bandwidth[ring[i - 1], here] if alone else chain_rate
            inside_rate = max(inside_rate, rate)
            alone = False
    steps = count - 1
    costs[0, 0] = 2 * steps * latency
    costs[0, 1] = 2 * steps / count / slowest
    if hosts == 1 or hosts == count:
        return
    slowest, latency = np.inf, 0.0
    for i in range(hosts):
        here, there = heads[i], heads[(i + 1) % hosts]
        slowest = min(slowest, a.duplex_bandwidth[here, there])
        latency = max(latency, a.latency[here, there])
    costs[1, 0] = 2 * inside_latency + 2 * (hosts - 1) * latency
    costs[1, 1] = 2 * inside_rate + 2 * (hosts - 1) / hosts / slowest


def reduce_s(costs, size_bytes):
    """Seconds of one all-reduce by the faster algorithm."""
    return min(costs[0, 0] + costs[0, 1] * size_bytes, costs[1, 0] + costs[1, 1] * size_bytes)


def norms_s(a, costs, lo, hi, replicas):
    """Seconds that replicas wait for batch norm's statistics, as `collectives.norm_sums_s`.

    ``replicas`` are those of the stage in a forward, and 0 in a backward.
    """
    norms = a.norms[0, hi] - a.norms[0, lo]
    if norms <= 0:
        return 0.0
    size_bytes = 2 * (a.norms[1, hi] - a.norms[1, lo]) / norms * STATISTIC_BYTES
    if replicas > 0:
        size_bytes = replicas * (size_bytes + STATISTIC_BYTES)
    return norms * (STATISTICS_S + reduce_s(costs, size_bytes))


def tail_of(a, costs, slowest, lo, hi, backward_s):
    """Seconds from the end of a stage's last backward to the end of its buckets.

    ``slowest`` are the rows of the slowest replica, which completes buckets last, the factor of its
    seconds, and the factor of what all replicas wait for together. Parameters that layers share are
    complete at the end of the backward.
    """
    rows, factor, crowd_factor = slowest
    waiting, shared = 0.0, a.parameters[lo, hi]
    free_s = -backward_s
    lowest = lo
    for layer in range(hi - 1, lo - 1, -1):
        if a.layer_parameters[layer] > 0:
            waiting += a.layer_parameters[layer]
            shared -= a.layer_parameters[layer]
            lowest = layer
        if waiting >= BUCKET_BYTES or (layer == lo and waiting > 0):
            at = layer if waiting >= BUCKET_BYTES else lowest
            done = between(a.backward, at, hi, rows) * factor - backward_s
            done += norms_s(a, costs, at, hi, 0) * crowd_factor
            count = np.ceil(waiting / BUCKET_BYTES)
            free_s = max(free_s, done) + count * reduce_s(costs, waiting / count)
            waiting = 0.0
    count = np.ceil(shared / BUCKET_BYTES)
    if count > 0:
        free_s = max(free_s, 0.0) + count * reduce_s(costs, shared / count)
    return max(0.0, free_s)


def cost_of_stage(a, order, first, last, lo, hi, rows, costs):
    """Seconds of forward and of backward on the slowest replica, and after its last backward.

    The last value covers the rest of the all-reduce, and the optimizer step.
    """
    factor = crowd(a, order, first, last)
    slowest_speed = np.inf
    slow_rows, slow_factor = 0, 0.0
    forward_s, backward_s = 0.0, -1.0
    for i in range(last - first):
        speed = a.speed[order[first + i]]
        slowest_speed = min(slowest_speed, speed)
        forward_s = max(forward_s, between(a.forward, lo, hi, rows[i]) * factor / speed)
        seconds = between(a.backward, lo, hi, rows[i]) * factor / speed
        if seconds > backward_s:
            backward_s = seconds
            slow_rows, slow_factor = rows[i], factor / speed
    tail_s = a.parameters[lo, hi] * a.step_s_per_byte * factor / slowest_speed
    if last - first > 1:
        all_reduce_costs(a, order, first, last, costs)
        forward_s += norms_s(a, costs, lo, hi, last - first) * factor
        backward_s += norms_s(a, costs, lo, hi, 0) * factor
        tail_s += tail_of(a, costs, (slow_rows, slow_factor, factor), lo, hi, backward_s)
    return forward_s, backward_s, tail_s
