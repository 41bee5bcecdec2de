"""DAPPLE's search over (layers planned, occupied devices), compiled by numba.

The arrays are those of `penstock.plan.dapple_arrays`; the algorithm in words is at
`penstock.plan.dapple.dapple`. A test compares it with a plain one of the same recurrence.
"""

# numba has no types: its decorator makes every compiled function unknown to a strict checker.
# pyright: basic

import numba
import numpy as np

from penstock.plan import dapple_latency
from penstock.plan.dapple_arrays import (
    GroupArrays,
    Integers,
    LayerArrays,
    LinkArrays,
    StepArrays,
)
from penstock.plan.run_tables import Floats

__all__ = ["EARLY_BACKWARD", "GPIPE", "ONE_F_ONE_B", "best_pipeline", "whole_model_s"]

compiled = numba.njit(cache=True)
# For what runs in the innermost loop, where handing over the many arrays costs more than the work.
hot = numba.njit(cache=True, inline="always")

LOADS = 4
"""Busiest resources of a transfer told apart; where more differ, the last ones are merged."""

GPIPE, ONE_F_ONE_B, EARLY_BACKWARD = 0, 1, 2

pivot_of = hot(dapple_latency.pivot_of)
latency_around_s = hot(dapple_latency.latency_around_s)


@compiled
def depth_of(schedule, stages_from_here, micro_batches):
    """Micro-batches in flight, as `penstock.plan.cost.depth_function` has them."""
    if schedule == GPIPE:
        return micro_batches
    if schedule == ONE_F_ONE_B:
        return min(stages_from_here, micro_batches)
    return min(2 * stages_from_here - 1, micro_batches)


@hot
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


@compiled
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


@compiled
def recomputes(layers, groups, group, lo, hi, depth, choice):
    """0: everything is kept, 1: recompute, -1: does not fit; ``choice`` -1 off, 0 auto, 1 on."""
    if choice <= 0 and fits(layers, groups, group, lo, hi, depth, False):
        return 0
    if choice >= 0 and fits(layers, groups, group, lo, hi, depth, True):
        return 1
    return -1


@compiled
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


@compiled
def add_load(loads, count, latency_s, tensors, rows):
    """Keep a resource's load unless another outweighs it; ``loads`` are at most `LOADS`."""
    for i in range(count):
        if loads[i, 0] >= latency_s and loads[i, 1] >= tensors and loads[i, 2] >= rows:
            return count
    kept = 0
    for i in range(count):
        if loads[i, 0] > latency_s or loads[i, 1] > tensors or loads[i, 2] > rows:
            loads[kept] = loads[i]
            kept += 1
    if kept == LOADS:
        kept -= 1
        latency_s = max(latency_s, loads[kept, 0])
        tensors, rows = max(tensors, loads[kept, 1]), max(rows, loads[kept, 2])
    loads[kept, 0], loads[kept, 1], loads[kept, 2] = latency_s, tensors, rows
    return kept + 1


@compiled
def transfer_loads(links, senders, sender_rows, receivers, receiver_rows, busy, loads):
    """The busiest resources of one transfer, as `penstock.plan.window_costs` has them.

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


@compiled
def add_message(busy, resource, each, latency_s, rows):
    """A message occupies a resource."""
    busy[resource, 0] += latency_s
    busy[resource, 1] += each
    busy[resource, 2] += each * rows


@compiled
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


@compiled
def load_s(loads, count, fixed, each):
    """Seconds of a transfer of tensors with so many bytes, fixed and for each row."""
    if fixed + each <= 0:
        return 0.0
    seconds = 0.0
    for i in range(count):
        seconds = max(seconds, loads[i, 0] + loads[i, 1] * fixed + loads[i, 2] * each)
    return seconds


@compiled
def move_loads(links, senders, sender_rows, receivers, receiver_rows, busy, loads, counts):
    """The loads of the transfers there and back between two groups."""
    counts[0] = transfer_loads(
        links, senders, sender_rows, receivers, receiver_rows, busy, loads[0]
    )
    counts[1] = transfer_loads(
        links, receivers, receiver_rows, senders, sender_rows, busy, loads[1]
    )


@compiled
def move_s(layers, loads, counts, way, cut):
    """Seconds of a transfer at a cut: way 0 of activations, way 1 of their gradients."""
    cut_bytes = layers.cut_bytes
    return load_s(loads[way], counts[way], cut_bytes[way, cut], cut_bytes[2 + way, cut])


@compiled
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


@compiled
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


@compiled
def bound_s(forward_s, backward_s, stages, rest_s, micro_batches):
    """Seconds that no plan with these first stages can be below by the closed form.

    ``rest_s`` is the least that the slowest of the later stages takes. Either the pivot lies
    behind these stages, and all of them count in warm-up and ending phase, or it is one of them,
    and then no later stage is slower.
    """
    steady = micro_batches - 1
    passed_s = least_s = 0.0
    for s in range(stages):
        own_s = forward_s[s] + backward_s[s]
        passed_s += own_s
        least_s = max(least_s, passed_s + steady * own_s)
    whole_s = passed_s + rest_s
    bound = max(least_s, passed_s + steady * rest_s)
    slowest_s = rest_s
    for q in range(stages - 1, -1, -1):
        own_s = forward_s[q] + backward_s[q]
        slowest_s = max(slowest_s, own_s)
        bound = min(bound, passed_s + steady * slowest_s)
        passed_s -= own_s
    # Warm-up, gap and ending phase together are a round trip of one micro-batch at least.
    return max(bound, whole_s)


@compiled
def first_stages(layers, links, groups, steps, memo, cut, place, run, chain, room):
    """Costs of the stages of a memoised prefix with ``stages + 2`` in all; -1: one does not fit.

    Fills ``chain`` (rows: forward, backward, tail; transfers are stages) and returns the number of
    its columns.
    """
    parent_cut, parent_place, parent_step, stages_of, _, _ = memo
    micro_batches, _, schedule, choice, _ = run
    busy, pool, pair, costs = room
    stages = stages_of[cut, place]
    column = 2 * stages - 2
    hi, p, following = cut, place, np.int64(-1)
    while stages > 0:
        step, lo = parent_step[hi, p], parent_cut[hi, p]
        before = parent_place[hi, p]
        group = steps.group[step]
        stage_costs(layers, groups, group, lo, hi, costs)
        behind = (stages_of[cut, place] + 2) - (stages - 1)
        depth = depth_of(schedule, behind, micro_batches)
        again = recomputes(layers, groups, group, lo, hi, depth, choice)
        if again < 0:
            return -1
        chain[0, column], chain[1, column], chain[2, column] = costs[0], costs[1], costs[2]
        if again > 0 and depth > 1:
            chain[1, column] += costs[0]
        if following >= 0:
            step_move(layers, links, steps, step, following, hi, busy, pool, pair)
            chain[0, column + 1], chain[1, column + 1], chain[2, column + 1] = pair[0], pair[1], 0.0
        following, hi, p = step, lo, before
        column -= 2
        stages -= 1
    return max(2 * stages_of[cut, place] - 1, 0)


@hot
def put_stage(layers, groups, group, lo, hi, behind, run, costs, chain, column):
    """Put a stage into ``chain``, with recompute only where it always is; memory comes later."""
    stage_costs(layers, groups, group, lo, hi, costs)
    chain[0, column], chain[1, column], chain[2, column] = costs[0], costs[1], costs[2]
    if run[3] > 0 and depth_of(run[2], behind, run[0]) > 1:
        chain[1, column] += costs[0]


@compiled
def fit_stage(layers, groups, group, lo, hi, behind, run, chain, column):
    """Whether a stage of `put_stage` fits; where it must recompute, its time grows."""
    depth = depth_of(run[2], behind, run[0])
    again = recomputes(layers, groups, group, lo, hi, depth, run[3])
    if again > 0 and run[3] == 0 and depth > 1:
        chain[1, column] += chain[0, column]
    return again >= 0


@hot
def chain_s(chain, stages, micro_batches):
    """The closed form of a chain of stages and transfers."""
    pivot = pivot_of(chain[0], chain[1], stages, micro_batches)
    return latency_around_s(chain[0], chain[1], chain[2], stages, micro_batches, pivot)


@compiled
def improve(memo, cut, place, stages, parent, seconds, fitting):
    """Keep the best prefix of each state: one whose plan fits first, then the least seconds."""
    parent_cut, parent_place, parent_step, stages_of, value, whole = memo
    if whole[cut, place] > fitting:
        return
    if whole[cut, place] == fitting and value[cut, place] <= seconds:
        return
    parent_cut[cut, place], parent_place[cut, place], parent_step[cut, place] = parent
    stages_of[cut, place] = stages
    value[cut, place], whole[cut, place] = seconds, fitting


@hot
def memo_s(chain, column, stages, micro_batches, idle, seconds):
    """What a prefix is judged by: seconds, or as if rows were enough for all devices left."""
    if idle <= 1:
        return seconds
    forward_s, backward_s = chain[0, column], chain[1, column]
    chain[0, column] /= idle
    chain[1, column] /= idle
    seconds = chain_s(chain, stages, micro_batches)
    chain[0, column], chain[1, column] = forward_s, backward_s
    return seconds


@hot
def least_chain_s(chain, own, passed, micro_batches):
    """What the closed form is not below: a round trip, or the slowest of all behind the first."""
    whole_s, slowest_s = passed
    for column in range(own, own + 3):
        column_s = chain[0, column] + chain[1, column]
        whole_s += column_s
        slowest_s = max(slowest_s, column_s)
    return max(whole_s, chain[0, 0] + chain[1, 0] + (micro_batches - 1) * slowest_s)


@hot
def try_last_stage(layers, groups, steps, memo, state, hi, run, chain, own, costs, passed, best):
    """Judge a prefix (first columns of ``chain``) with a next stage and one last stage behind."""
    cut, place, step = state
    group, target, last = steps.group[step], steps.target[step], layers.forward_each.shape[0] - 1
    rest, idle = steps.rest_group[target], steps.idle[target]
    put_stage(layers, groups, rest, hi, last, 1, run, costs, chain, own + 2)
    known_s = memo[4][hi, target] if memo[5][hi, target] > 0 else np.inf
    if idle <= 1 and least_chain_s(chain, own, passed, run[0]) >= max(known_s, best[0]):
        return
    seconds = chain_s(chain, own + 3, run[0])
    value = memo_s(chain, own + 2, own + 3, run[0], idle, seconds)
    if known_s <= value and seconds >= best[0]:
        return
    if not fit_stage(layers, groups, group, cut, hi, 2, run, chain, own):
        return
    fitting = fit_stage(layers, groups, rest, hi, last, 1, run, chain, own + 2)
    seconds = chain_s(chain, own + 3, run[0])
    if fitting and seconds < best[0]:
        best[0], best[1], best[2], best[3], best[4] = seconds, cut, place, step, hi
    value = memo_s(chain, own + 2, own + 3, run[0], idle, seconds)
    improve(memo, hi, target, memo[3][cut, place] + 1, state, value, int(fitting))


@compiled
def try_step(layers, groups, steps, memo, state, run, chain, own, costs, move, passed, best):
    """Try every end of a next stage; ``passed``: seconds of the prefix, its slowest stage's."""
    cut, _, step = state
    steady, size = run[0] - 1, run[1]
    group, target, last = steps.group[step], steps.target[step], layers.forward_each.shape[0] - 1
    for hi in range(cut + 1, last):
        rest_s = (layers.least_each[last] - layers.least_each[hi]) * size
        rest_s /= steps.speed_left[target]
        if steady * rest_s >= best[0]:
            continue
        put_stage(layers, groups, group, cut, hi, 2, run, costs, chain, own)
        own_s = chain[0, own] + chain[1, own]
        slowest_s = max(passed[1], own_s)
        if max(passed[0] + own_s, slowest_s * steady) >= best[0]:
            break
        least_s = chain[0, 0] + chain[1, 0] + steady * max(slowest_s, rest_s)
        if max(passed[0] + own_s + rest_s, least_s) >= best[0]:
            continue
        chain[0, own + 1], chain[1, own + 1], chain[2, own + 1] = move[0, hi], move[1, hi], 0.0
        try_last_stage(layers, groups, steps, memo, state, hi, run, chain, own, costs, passed, best)


@compiled
def expand(layers, links, groups, steps, memo, cut, place, run, chain, room, rests, best):
    """Try every next stage behind one prefix, with one last stage behind it."""
    busy, pool, pair, costs = room
    rest_moves, rest_known = rests
    last = layers.forward_each.shape[0] - 1
    stages = memo[3][cut, place]
    columns = first_stages(layers, links, groups, steps, memo, cut, place, run, chain, room)
    if columns < 0:
        return
    rest_s = (layers.least_each[last] - layers.least_each[cut]) * run[1] / steps.speed_left[place]
    if bound_s(chain[0], chain[1], columns, rest_s, run[0]) >= best[0]:
        return
    before_s = slowest_before_s = 0.0
    for column in range(columns):
        before_s += chain[0, column] + chain[1, column]
        slowest_before_s = max(slowest_before_s, chain[0, column] + chain[1, column])
    own = columns + 1 if stages else 0
    for step in range(steps.out[place], steps.out[place + 1]):
        if steps.group[step] < 0:
            continue
        passed_s, slowest_s = before_s, slowest_before_s
        if stages:
            step_move(layers, links, steps, memo[2][cut, place], step, cut, busy, pool, pair)
            chain[0, own - 1], chain[1, own - 1], chain[2, own - 1] = pair[0], pair[1], 0.0
            passed_s += pair[0] + pair[1]
            slowest_s = max(slowest_s, pair[0] + pair[1])
        if not rest_known[step]:
            rest_move(layers, links, steps, step, busy, rest_moves[step])
            rest_known[step] = True
        state, passed = (cut, place, step), (passed_s, slowest_s)
        move = rest_moves[step]
        try_step(layers, groups, steps, memo, state, run, chain, own, costs, move, passed, best)


@compiled
def explore(layers, links, groups, steps, run, limit_s):
    """The best plan of at least two stages whose closed form is below ``limit_s``.

    ``run`` is micro-batches, their size, schedule, recompute choice and most stages. Returns
    seconds, cut and occupancy of the prefix, last step and last cut (seconds of ``limit_s`` where
    there is none), and the memo of the prefixes.
    """
    size, places = layers.forward_each.shape[0], steps.rest_group.shape[0]
    most_stages = run[4]
    widest = 1
    for place in range(places):
        widest = max(widest, steps.out[place + 1] - steps.out[place])
    count = steps.target.shape[0]
    memo = (
        np.full((size, places), -1),
        np.full((size, places), -1),
        np.full((size, places), -1),
        np.zeros((size, places), dtype=np.int64),
        np.full((size, places), np.inf),
        np.full((size, places), -1),
    )
    kept = min(1 << 16, max(1, count * widest))
    pool = (
        np.full((count, widest), -1),
        np.empty((kept, 2, LOADS, 3)),
        np.empty((kept, 2), dtype=np.int64),
        np.full(kept + 1, -1),
    )
    pool[3][0] = 0
    resources = 2 * (links.host.shape[0] + links.link_each.shape[0])
    room = (np.zeros((resources, 3)), pool, np.zeros(2), np.zeros(3))
    chain = np.zeros((3, 2 * most_stages + 1))
    rests = (np.empty((count, 2, size)), np.zeros(count, dtype=np.bool_))
    best = np.array([limit_s, -1.0, -1.0, -1.0, -1.0])
    memo[5][0, 0] = 1
    for cut in range(size - 1):
        for place in range(places):
            if memo[5][cut, place] >= 0 and memo[3][cut, place] + 2 <= most_stages:
                expand(
                    layers, links, groups, steps, memo, cut, place, run, chain, room, rests, best
                )
    return best, memo[0], memo[1], memo[2]


@compiled
def one_stage_s(layers, groups, group, run):
    """The closed form of all layers on one group of devices; infinite where they do not fit."""
    chain, costs = np.zeros((3, 1)), np.zeros(3)
    last = layers.forward_each.shape[0] - 1
    put_stage(layers, groups, group, 0, last, 1, run, costs, chain, 0)
    if not fit_stage(layers, groups, group, 0, last, 1, run, chain, 0):
        return np.inf
    return chain_s(chain, 1, run[0])


def best_pipeline(
    layers: LayerArrays,
    links: LinkArrays,
    groups: GroupArrays,
    steps: StepArrays,
    run: tuple[int, int, int, int, int],
    limit_s: float,
) -> tuple[Floats, tuple[Integers, Integers, Integers]]:
    """The figures of the best plan (see `explore`), and cut, occupancy and step before each."""
    best, cuts, places, taken = explore(layers, links, groups, steps, run, limit_s)
    return best, (cuts, places, taken)


def whole_model_s(
    layers: LayerArrays, groups: GroupArrays, group: int, run: tuple[int, int, int, int, int]
) -> float:
    """Seconds of data parallelism on a group of devices; infinite where it does not fit."""
    return one_stage_s(layers, groups, group, run)
