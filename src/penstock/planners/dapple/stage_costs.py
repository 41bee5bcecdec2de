"""What stages and transfers cost in DAPPLE's search, compiled by numba.

The rules are those of `penstock.plan.cost`, on the arrays of `penstock.planners.dapple.arrays`.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np

from penstock.kernels import copy_into

__all__ = [
    "LOADS",
    "depth_of",
    "fit_stage",
    "put_stage",
    "recomputes",
    "rest_move",
    "stage_costs",
    "step_move",
]

LOADS = 4
"""Busiest resources of a transfer told apart; where more differ, the last ones are merged."""

GPIPE, ONE_F_ONE_B = 0, 1
"""Schedules by number; any other is the early-backward one."""


def depth_of(schedule, stages_from_here, micro_batches):
    """Micro-batches in flight, as `penstock.plan.cost.depth_function` has them."""
    if schedule == GPIPE:
        return micro_batches
    if schedule == ONE_F_ONE_B:
        return min(stages_from_here, micro_batches)
    return min(2 * stages_from_here - 1, micro_batches)


def stage_costs(layers, groups, group, lo, hi, out):
    """Put forward, backward and tail seconds of layers ``lo..hi-1`` on a group into ``out``."""
    forward_s = 0.0
    backward_s = 0.0
    forward_fixed = layers.forward_fixed[hi] - layers.forward_fixed[lo]
    forward_each = layers.forward_each[hi] - layers.forward_each[lo]
    backward_fixed = layers.backward_fixed[hi] - layers.backward_fixed[lo]
    backward_each = layers.backward_each[hi] - layers.backward_each[lo]
    for kind in range(groups.start[group], groups.start[group + 1]):
        rows, speed = groups.rows[kind], groups.speed[kind]
        forward_s = max(forward_s, (forward_fixed + rows * forward_each) / speed)
        backward_s = max(backward_s, (backward_fixed + rows * backward_each) / speed)
    size_bytes = layers.parameter_bytes[lo, hi]
    reduce_s = 0.0
    if size_bytes > 0 and groups.ways[group] > 0:
        reduce_s = np.inf
        for way in range(groups.ways[group]):
            way_s = groups.way_latency[group, way] + groups.way_each[group, way] * size_bytes
            reduce_s = min(reduce_s, way_s)
    out[0] = forward_s * groups.crowd[group]
    out[1] = backward_s * groups.crowd[group]
    out[2] = reduce_s + groups.step_each[group] * size_bytes


def fits(layers, groups, group, lo, hi, depth, recompute):
    """Whether every device of a group holds the layers with ``depth`` micro-batches in flight."""
    saved_fixed = layers.saved_fixed[hi] - layers.saved_fixed[lo]
    saved_each = layers.saved_each[hi] - layers.saved_each[lo]
    for kind in range(groups.start[group], groups.start[group + 1]):
        rows = groups.rows[kind]
        held = layers.held_bytes[lo, hi] + groups.workspace[groups.workspace_index[kind], lo, hi]
        saved = saved_fixed + rows * saved_each
        if recompute and depth > 1:
            inputs = layers.input_fixed[lo, hi] + rows * layers.input_each[lo, hi]
            held += (depth - 1) * inputs + max(saved, inputs)
        else:
            held += depth * saved
        if held > groups.memory[kind]:
            return False
    return True


def recomputes(layers, groups, group, lo, hi, depth, choice):
    """0: everything is kept, 1: recompute, -1: does not fit; ``choice`` -1 off, 0 auto, 1 on."""
    if choice <= 0 and fits(layers, groups, group, lo, hi, depth, False):
        return 0
    if choice >= 0 and fits(layers, groups, group, lo, hi, depth, True):
        return 1
    return -1


def put_stage(layers, groups, group, lo, hi, behind, run, costs, chain, column):
    """Put a stage into ``chain``, with recompute only where it always is; memory comes later."""
    stage_costs(layers, groups, group, lo, hi, costs)
    chain[0, column], chain[1, column], chain[2, column] = costs[0], costs[1], costs[2]
    if run[3] > 0 and depth_of(run[2], behind, run[0]) > 1:
        chain[1, column] += costs[0]


def fit_stage(layers, groups, group, lo, hi, behind, run, chain, column):
    """Whether a stage of `put_stage` fits; where it must recompute, its time grows."""
    depth = depth_of(run[2], behind, run[0])
    again = recomputes(layers, groups, group, lo, hi, depth, run[3])
    if again > 0 and run[3] == 0 and depth > 1:
        chain[1, column] += chain[0, column]
    return again >= 0


def link(links, source, target):
    """Seconds a byte, latency, and whether the ports of two hosts are passed."""
    if links.special_each.shape[0] and links.special_each[source, target] >= 0:
        special = links.special_each[source, target], links.special_latency[source, target]
        return special[0], special[1], False
    a, b = links.host[source], links.host[target]
    if a == b:
        return links.link_each[a], links.link_latency[a], False
    each = max(links.port_each[a], links.port_each[b])
    return each, max(links.port_latency[a], links.port_latency[b]), True


def add_load(loads, count, latency_s, tensors, rows):
    """Keep a resource's load unless another outweighs it; ``loads`` are at most `LOADS`."""
    for i in range(count):
        if loads[i, 0] >= latency_s and loads[i, 1] >= tensors and loads[i, 2] >= rows:
            return count
    kept = 0
    for i in range(count):
        if loads[i, 0] > latency_s or loads[i, 1] > tensors or loads[i, 2] > rows:
            copy_into(loads[kept], loads[i])
            kept += 1
    if kept == LOADS:
        kept -= 1
        latency_s = max(latency_s, loads[kept, 0])
        tensors, rows = max(tensors, loads[kept, 1]), max(rows, loads[kept, 2])
    loads[kept, 0], loads[kept, 1], loads[kept, 2] = latency_s, tensors, rows
    return kept + 1


def transfer_loads(links, senders, sender_rows, receivers, receiver_rows, busy, loads):
    """The busiest resources of one transfer, as `split_concat_s` has them.

    ``busy[r]`` is room for latency, tensors and rows of resource ``r``: senders' engines,
    receivers' engines, ports out, ports in. Each tensor's bytes weigh ``tensors`` where they do
    not depend on rows.
    """
    devices, hosts = links.host.shape[0], links.link_each.shape[0]
    i = j = row = have = need = 0
    have, need = sender_rows[0], receiver_rows[0]
    for device in senders:
        busy[device] = 0.0
        busy[2 * devices + links.host[device]] = 0.0
    for device in receivers:
        busy[devices + device] = 0.0
        busy[2 * devices + hosts + links.host[device]] = 0.0
    while i < senders.shape[0] and j < receivers.shape[0]:
        end = min(have, need)
        a, b = senders[i], receivers[j]
        if end > row and a != b:
            each, latency_s, by_port = link(links, a, b)
            add_message(busy, a, each, latency_s, end - row)
            add_message(busy, devices + b, each, latency_s, end - row)
            if by_port:
                add_message(busy, 2 * devices + links.host[a], each, latency_s, end - row)
                add_message(busy, 2 * devices + hosts + links.host[b], each, latency_s, end - row)
        row = end
        if have == end:
            i += 1
            have += sender_rows[i] if i < senders.shape[0] else 0
        if need == end:
            j += 1
            need += receiver_rows[j] if j < receivers.shape[0] else 0
    return busiest(links, senders, receivers, busy, loads)


def add_message(busy, resource, each, latency_s, rows):
    """A message occupies a resource."""
    busy[resource, 0] += latency_s
    busy[resource, 1] += each
    busy[resource, 2] += each * rows


def busiest(links, senders, receivers, busy, loads):
    """Collect the loads of all resources that a transfer touched."""
    devices, hosts = links.host.shape[0], links.link_each.shape[0]
    count = 0
    for device in senders:
        for r in (device, 2 * devices + links.host[device]):
            count = add_load(loads, count, busy[r, 0], busy[r, 1], busy[r, 2])
    for device in receivers:
        for r in (devices + device, 2 * devices + hosts + links.host[device]):
            count = add_load(loads, count, busy[r, 0], busy[r, 1], busy[r, 2])
    return count


def load_s(loads, count, fixed, each):
    """Seconds of a transfer of tensors with so many bytes, fixed and for each row."""
    if fixed + each <= 0:
        return 0.0
    seconds = 0.0
    for i in range(count):
        seconds = max(seconds, loads[i, 0] + loads[i, 1] * fixed + loads[i, 2] * each)
    return seconds


def move_loads(links, senders, sender_rows, receivers, receiver_rows, busy, loads, counts):
    """The loads of the transfers there and back between two groups."""
    counts[0] = transfer_loads(
        links, senders, sender_rows, receivers, receiver_rows, busy, loads[0]
    )
    counts[1] = transfer_loads(
        links, receivers, receiver_rows, senders, sender_rows, busy, loads[1]
    )


def move_s(layers, loads, counts, way, cut):
    """Seconds of a transfer at a cut: way 0 of activations, way 1 of their gradients."""
    cut_bytes = layers.cut_bytes
    return load_s(loads[way], counts[way], cut_bytes[way, cut], cut_bytes[2 + way, cut])


def rest_move(layers, links, steps, step, busy, out):
    """Seconds of the transfers from a step's stage to a last stage behind it, at every cut."""
    loads = np.empty((2, LOADS, 3))
    counts = np.empty(2, dtype=np.int64)
    own = slice(steps.start[step], steps.start[step + 1])
    behind = steps.target[step]
    rest = slice(steps.rest_start[behind], steps.rest_start[behind + 1])
    move_loads(
        links,
        steps.sender[own],
        steps.slices[own],
        steps.rest_device[rest],
        steps.rest_slices[rest],
        busy,
        loads,
        counts,
    )
    for cut in range(out.shape[1]):
        out[0, cut] = move_s(layers, loads, counts, 0, cut)
        out[1, cut] = move_s(layers, loads, counts, 1, cut)


def step_move(layers, links, steps, before, step, cut, busy, pool, pair):
    """Seconds of the transfers at a cut between the stages of two steps, one after the other."""
    slots, loads, counts, filled = pool
    place = step - steps.out[steps.target[before]]
    slot = slots[before, place]
    if slot < 0:
        slot = filled[0] % loads.shape[0]
        old = filled[1 + slot]
        if old >= 0:
            slots[old // slots.shape[1], old % slots.shape[1]] = -1
        filled[1 + slot] = before * slots.shape[1] + place
        filled[0] += 1
        slots[before, place] = slot
        one = slice(steps.start[before], steps.start[before + 1])
        two = slice(steps.start[step], steps.start[step + 1])
        move_loads(
            links,
            steps.sender[one],
            steps.slices[one],
            steps.receiver[two],
            steps.slices[two],
            busy,
            loads[slot],
            counts[slot],
        )
    pair[0] = move_s(layers, loads[slot], counts[slot], 0, cut)
    pair[1] = move_s(layers, loads[slot], counts[slot], 1, cut)
