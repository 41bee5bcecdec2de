"""DAPPLE's search over (layers planned, occupied devices), compiled by numba.

The arrays are those of `penstock.planners.dapple.arrays`; the algorithm in words is at
`dapple.dapple`. A test compares it with a plain one of the same recurrence.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import NamedTuple

import numpy as np

from penstock.borrowed import borrowed
from penstock.plan.run_tables import Floats
from penstock.planners.dapple.arrays import (
    GroupArrays,
    Integers,
    LayerArrays,
    LinkArrays,
    StepArrays,
)
from penstock.planners.dapple.latency import latency_around_s, pivot_of
from penstock.planners.dapple.stage_costs import (
    LOADS,
    depth_of,
    fit_stage,
    put_stage,
    recomputes,
    rest_move,
    stage_costs,
    step_move,
)

__all__ = ["explore", "one_stage_s"]


class Memo(NamedTuple):
    """The best prefix of each state (cut, occupied devices), and where it came from."""

    parent_cut: Integers
    parent_place: Integers
    parent_step: Integers
    stages: Integers
    seconds: Floats
    fits: Integers


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


def first_stages(layers, links, groups, steps, memo, cut, place, run, chain, room):
    """Costs of the stages of a memoised prefix with ``stages + 2`` in all; -1: one does not fit.

    Fills ``chain`` (rows: forward, backward, tail; transfers are stages) and returns the number of
    its columns.
    """
    micro_batches, _, schedule, choice, _ = run
    busy, pool, pair, costs = room
    stages = memo.stages[cut, place]
    column = 2 * stages - 2
    hi, p, following = cut, place, np.int64(-1)
    while stages > 0:
        step, lo = memo.parent_step[hi, p], memo.parent_cut[hi, p]
        before = memo.parent_place[hi, p]
        group = steps.group[step]
        stage_costs(layers, groups, group, lo, hi, costs)
        behind = (memo.stages[cut, place] + 2) - (stages - 1)
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
    return max(2 * memo.stages[cut, place] - 1, 0)


def chain_s(chain, stages, micro_batches):
    """The closed form of a chain of stages and transfers."""
    pivot = pivot_of(chain[0], chain[1], stages, micro_batches)
    return latency_around_s(chain[0], chain[1], chain[2], stages, micro_batches, pivot)


def improve(memo, cut, place, stages, parent, seconds, fitting):
    """Keep the best prefix of each state: one whose plan fits first, then the least seconds."""
    if memo.fits[cut, place] > fitting:
        return
    if memo.fits[cut, place] == fitting and memo.seconds[cut, place] <= seconds:
        return
    memo.parent_cut[cut, place], memo.parent_place[cut, place] = parent[0], parent[1]
    memo.parent_step[cut, place] = parent[2]
    memo.stages[cut, place] = stages
    memo.seconds[cut, place], memo.fits[cut, place] = seconds, fitting


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


def least_chain_s(chain, own, passed, micro_batches):
    """What the closed form is not below: a round trip, or the slowest of all behind the first."""
    whole_s, slowest_s = passed
    for column in range(own, own + 3):
        column_s = chain[0, column] + chain[1, column]
        whole_s += column_s
        slowest_s = max(slowest_s, column_s)
    return max(whole_s, chain[0, 0] + chain[1, 0] + (micro_batches - 1) * slowest_s)


def try_last_stage(layers, groups, steps, memo, state, hi, run, chain, own, costs, passed, best):
    """Judge a prefix (first columns of ``chain``) with a next stage and one last stage behind."""
    cut, place, step = state
    group, target, last = steps.group[step], steps.target[step], layers.forward_each.shape[0] - 1
    rest, idle = steps.rest_group[target], steps.idle[target]
    put_stage(layers, groups, rest, hi, last, 1, run, costs, chain, own + 2)
    known_s = memo.seconds[hi, target] if memo.fits[hi, target] > 0 else np.inf
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
    improve(memo, hi, target, memo.stages[cut, place] + 1, state, value, int(fitting))


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


def expand(layers, links, groups, steps, memo, cut, place, run, chain, room, rests, best):
    """Try every next stage behind one prefix, with one last stage behind it."""
    busy, pool, pair, costs = room
    rest_moves, rest_known = rests
    last = layers.forward_each.shape[0] - 1
    stages = memo.stages[cut, place]
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
            step_move(
                layers, links, steps, memo.parent_step[cut, place], step, cut, busy, pool, pair
            )
            chain[0, own - 1], chain[1, own - 1], chain[2, own - 1] = pair[0], pair[1], 0.0
            passed_s += pair[0] + pair[1]
            slowest_s = max(slowest_s, pair[0] + pair[1])
        if not rest_known[step]:
            rest_move(layers, links, steps, step, busy, rest_moves[step])
            rest_known[step] = True
        state, passed = (cut, place, step), (passed_s, slowest_s)
        move = rest_moves[step]
        try_step(layers, groups, steps, memo, state, run, chain, own, costs, move, passed, best)


def explore(
    layers: LayerArrays,
    links: LinkArrays,
    groups: GroupArrays,
    steps: StepArrays,
    run: tuple[int, int, int, int, int],
    limit_s: float,
) -> tuple[Floats, Integers, Integers, Integers]:
    """The best plan of at least two stages whose closed form is below ``limit_s``.

    ``run`` is micro-batches, their size, schedule, recompute choice and most stages. Returns
    seconds, cut and occupancy of the prefix, last step and last cut (seconds of ``limit_s`` where
    there is none), and the memo of the prefixes.
    """
    layers, links = borrowed(layers), borrowed(links)
    groups, steps = borrowed(groups), borrowed(steps)
    size, places = layers.forward_each.shape[0], steps.rest_group.shape[0]
    most_stages = run[4]
    widest = 1
    for place in range(places):
        widest = max(widest, steps.out[place + 1] - steps.out[place])
    count = steps.target.shape[0]
    found = Memo(
        np.full((size, places), -1),
        np.full((size, places), -1),
        np.full((size, places), -1),
        np.zeros((size, places), dtype=np.int64),
        np.full((size, places), np.inf),
        np.full((size, places), -1),
    )
    memo = borrowed(found)
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
    memo.fits[0, 0] = 1
    for cut in range(size - 1):
        for place in range(places):
            if memo.fits[cut, place] >= 0 and memo.stages[cut, place] + 2 <= most_stages:
                expand(
                    layers, links, groups, steps, memo, cut, place, run, chain, room, rests, best
                )
    return best, found.parent_cut, found.parent_place, found.parent_step


def one_stage_s(
    layers: LayerArrays, groups: GroupArrays, group: int, run: tuple[int, int, int, int, int]
) -> float:
    """The closed form of all layers on one group of devices; infinite where they do not fit."""
    layers, groups = borrowed(layers), borrowed(groups)
    chain, costs = np.zeros((3, 1)), np.zeros(3)
    last = layers.forward_each.shape[0] - 1
    put_stage(layers, groups, group, 0, last, 1, run, costs, chain, 0)
    if not fit_stage(layers, groups, group, 0, last, 1, run, chain, 0):
        return np.inf
    return chain_s(chain, 1, run[0])
