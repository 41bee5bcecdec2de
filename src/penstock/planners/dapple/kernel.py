"""DAPPLE's search over (layers planned, occupied devices), compiled by numba.

The algorithm in words is at `dapple.dapple`. A test compares it with a plain one of the same
recurrence.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import Any, NamedTuple

import numpy as np

from penstock.borrowed import borrowed
from penstock.kernels import compiled
from penstock.plan.compiled_cost import (
    ALWAYS,
    AUTO,
    FIGURES,
    FULL,
    LOADS,
    RECOMPUTES,
    all_reduce_and_step_s,
    backward_s,
    forward_s,
    load_s,
    recomputes,
    resources,
    transfer_loads,
)
from penstock.plan.cost_tables import Costs, Network
from penstock.plan.run_tables import Floats, Integers
from penstock.planners.dapple.latency import latency_s
from penstock.planners.dapple.steps import Steps

__all__ = ["Best", "Memo", "SearchInputs", "explored"]

MOST_SLOTS = 1 << 16
"""Pairs of steps whose transfers are remembered."""

NOWHERE = -1


class SearchInputs(NamedTuple):
    """What is searched for.

    ``depths[k]`` are the micro-batches in flight of a stage with ``k`` stages from itself to the
    end; ``least_s`` sums up to each cut what a row of each layer takes at least.
    """

    micro_batches: int
    size: int
    recompute: int
    most_stages: int
    depths: Integers
    least_s: Floats


class Memo(NamedTuple):
    """The best prefix of each state, by cut and occupancy: its last step, where that started.

    ``stages`` are those of the prefix; ``seconds`` what it was judged by; ``fits`` whether the plan
    that it was judged by does, -1 for no prefix.
    """

    cut: Integers
    place: Integers
    step: Integers
    stages: Integers
    seconds: Floats
    fits: Integers


class Best(NamedTuple):
    """One entry each: the best plan's seconds, state before the last step, that step, its end."""

    seconds: Floats
    cut: Integers
    place: Integers
    step: Integers
    end: Integers


class SearchWorkspace(NamedTuple):
    """What the search works with: the stages and transfers of a plan, in turn, by column.

    Then, for each cut, the transfers down and up from each step to a last stage behind it, where
    they are ``known``; the loads of transfers between two steps (see `slot_of`), and what
    `transfer_loads` works on.
    """

    forward_s: Floats
    backward_s: Floats
    tail_s: Floats
    known: Integers
    down_s: Floats
    up_s: Floats
    slots: int
    owner: Integers
    counts: Integers
    loads: Floats
    busy: Floats


class SearchAddresses(NamedTuple):
    """All of it, as addresses."""

    costs: Any
    network: Any
    steps: Any
    asked: Any
    memo: Any
    best: Any
    room: Any


def explored(
    costs: Costs, network: Network, steps: Steps, asked: SearchInputs, limit_s: float
) -> tuple[Best, Memo]:
    """The best plan of at least two stages whose closed form is below ``limit_s``, and the memo.

    The last step is `NOWHERE` where there is none.
    """
    cuts, columns = costs.cuts, 2 * asked.most_stages + 1
    cut, place, step = np.full((3, cuts, steps.places), NOWHERE)
    stages = np.zeros((cuts, steps.places), dtype=np.int64)
    memo = Memo(cut, place, step, stages, np.full(stages.shape, np.inf), np.full_like(stages, -1))
    best = Best(np.array([limit_s]), *(np.array([NOWHERE]) for _ in range(4)))
    slots = min(MOST_SLOTS, steps.steps * steps.widest)
    room = SearchWorkspace(
        np.zeros(columns),
        np.zeros(columns),
        np.zeros(columns),
        np.zeros(steps.steps, dtype=np.int64),
        np.empty(steps.steps * cuts),
        np.empty(steps.steps * cuts),
        slots,
        np.full(slots, NOWHERE),
        np.empty(2 * slots + 2, dtype=np.int64),
        np.empty((2 * slots + 2) * LOADS * FIGURES),
        np.zeros(FIGURES * resources(network)),
    )
    compiled(explore)(costs, network, steps, asked, memo, best, room)
    return best, memo


def explore(
    costs: Costs,
    network: Network,
    steps: Steps,
    asked: SearchInputs,
    memo: Memo,
    best: Best,
    room: SearchWorkspace,
) -> None:
    """Fill the memo from no layers to all of them."""
    search = SearchAddresses(
        borrowed(costs),
        borrowed(network),
        borrowed(steps),
        borrowed(asked),
        borrowed(memo),
        borrowed(best),
        borrowed(room),
    )
    search.memo.fits[0] = 1
    for cut in range(costs.cuts - 1):
        for place in range(steps.places):
            state = cut * steps.places + place
            prefix_stages = search.memo.stages[state]
            if search.memo.fits[state] >= 0 and prefix_stages + 2 <= asked.most_stages:
                expand(search, cut, place)


def expand(search, cut, place):
    """Try every next stage behind one prefix, with one last stage behind it."""
    steps, room, best, asked = search.steps, search.room, search.best, search.asked
    state = cut * steps.places + place
    columns = first_stages(search, cut, place)
    if columns < 0:
        return
    left_s = rest_s(search, cut, place)
    if (
        bound_s(room.forward_s, room.backward_s, columns, left_s, asked.micro_batches)
        >= (best.seconds[0])
    ):
        return
    before_s = slowest_before_s = 0.0
    for column in range(columns):
        column_s = room.forward_s[column] + room.backward_s[column]
        before_s += column_s
        slowest_before_s = max(slowest_before_s, column_s)
    own = columns + 1 if columns else 0
    for step in range(steps.out[place], steps.out[place + 1]):
        if steps.group[step] >= 0:
            passed_s, slowest_s = before_s, slowest_before_s
            if columns:
                put_move(search, search.memo.step[state], step, cut, own - 1)
                moved_s = room.forward_s[own - 1] + room.backward_s[own - 1]
                passed_s += moved_s
                slowest_s = max(slowest_s, moved_s)
            if not room.known[step]:
                put_rest_moves(search, step)
            try_step(search, cut, place, step, own, passed_s, slowest_s)


def rest_s(search, cut, place):
    """What the layers behind a cut take at least on the devices that an occupancy leaves."""
    least_s = search.asked.least_s
    left_s = (least_s[search.costs.cuts - 1] - least_s[cut]) * search.asked.size
    return left_s / search.steps.speed_left[place]


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


def first_stages(search, cut, place):
    """Put the stages of a prefix into their columns, as the first of two more; how many columns.

    -1 where one does not fit.
    """
    steps, memo = search.steps, search.memo
    state = cut * steps.places + place
    count, hi, following = memo.stages[state], cut, NOWHERE
    for stage in range(count - 1, -1, -1):
        step, lo, before = memo.step[state], memo.cut[state], memo.place[state]
        group, behind = steps.group[step], count + 2 - stage
        put_stage(search, group, lo, hi, behind, 2 * stage)
        if not fit_stage(search, group, lo, hi, behind, 2 * stage):
            return -1
        if following != NOWHERE:
            put_move(search, step, following, hi, 2 * stage + 1)
        following, hi = step, lo
        state = lo * steps.places + before
    return max(2 * count - 1, 0)


def put_stage(search, group, lo, hi, behind, column):
    """Put a stage into a column, with recompute only where it always is; memory comes later."""
    costs, room, asked = search.costs, search.room, search.asked
    room.forward_s[column] = forward_s(costs, group, lo, hi)
    room.backward_s[column] = backward_s(costs, group, lo, hi)
    room.tail_s[column] = all_reduce_and_step_s(costs, group, lo, hi)
    if asked.recompute == ALWAYS and asked.depths[behind] > 1:
        room.backward_s[column] += room.forward_s[column]


def fit_stage(search, group, lo, hi, behind, column):
    """Whether a stage of `put_stage` fits; where it must recompute, its time grows."""
    asked, room = search.asked, search.room
    depth = asked.depths[behind]
    does = recomputes(search.costs, group, lo, hi, depth, asked.recompute)
    if does == RECOMPUTES and asked.recompute == AUTO and depth > 1:
        room.backward_s[column] += room.forward_s[column]
    return does != FULL


def put_move(search, before, step, cut, column):
    """Put the transfers at a cut between the stages of two steps, in turn, into a column."""
    room, steps = search.room, search.steps
    pair = before * steps.widest + step - steps.out[steps.target[before]]
    slot = pair % room.slots
    if room.owner[slot] != pair:
        room.owner[slot] = pair
        put_loads(search, slot, before, steps.steps + step)
    room.forward_s[column], room.backward_s[column] = moves_s(search, slot, cut)
    room.tail_s[column] = 0.0


def put_rest_moves(search, step):
    """The transfers at every cut from a step's stage to a last stage behind it."""
    room, steps, cuts = search.room, search.steps, search.costs.cuts
    put_loads(search, room.slots, step, 2 * steps.steps + steps.target[step])
    for cut in range(cuts):
        place = step * cuts + cut
        room.down_s[place], room.up_s[place] = moves_s(search, room.slots, cut)
    room.known[step] = 1


def put_loads(search, slot, sender, receiver):
    """The loads of the transfers there and back between two groups."""
    network, room = search.network, search.room
    down, up = 2 * slot, 2 * slot + 1
    each = LOADS * FIGURES
    room.counts[down] = transfer_loads(
        network, sender, receiver, room.busy, room.loads, down * each
    )
    room.counts[up] = transfer_loads(network, receiver, sender, room.busy, room.loads, up * each)


def moves_s(search, slot, cut):
    """Seconds of the transfers at a cut: of activations, and of their gradients."""
    costs, room = search.costs, search.room
    down, up = 2 * slot, 2 * slot + 1
    each = LOADS * FIGURES
    fixed, per_row = costs.down_fixed[cut], costs.down_each[cut]
    down_s = load_s(room.loads, down * each, room.counts[down], fixed, per_row)
    fixed, per_row = costs.up_fixed[cut], costs.up_each[cut]
    return down_s, load_s(room.loads, up * each, room.counts[up], fixed, per_row)


def try_step(search, cut, place, step, own, passed_s, slowest_s):
    """Try every end of a next stage; ``passed_s``: of the prefix, ``slowest_s``: of one of it."""
    steps, room, best, cuts = search.steps, search.room, search.best, search.costs.cuts
    steady, target = search.asked.micro_batches - 1, steps.target[step]
    for hi in range(cut + 1, cuts - 1):
        left_s = rest_s(search, hi, target)
        if steady * left_s >= best.seconds[0]:
            continue
        put_stage(search, steps.group[step], cut, hi, 2, own)
        own_s = room.forward_s[own] + room.backward_s[own]
        slowest = max(slowest_s, own_s)
        if max(passed_s + own_s, slowest * steady) >= best.seconds[0]:
            break
        least_s = room.forward_s[0] + room.backward_s[0] + steady * max(slowest, left_s)
        if max(passed_s + own_s + left_s, least_s) < best.seconds[0]:
            move = step * cuts + hi
            room.forward_s[own + 1], room.backward_s[own + 1] = room.down_s[move], room.up_s[move]
            room.tail_s[own + 1] = 0.0
            try_last_stage(search, cut, place, step, hi, own, (passed_s, slowest_s))


def try_last_stage(search, cut, place, step, hi, own, passed):
    """Judge a prefix (first columns) with a next stage and one last stage behind."""
    steps, memo, best, costs = search.steps, search.memo, search.best, search.costs
    target, last = steps.target[step], costs.cuts - 1
    rest, idle = steps.rest_group[target], steps.idle[target]
    state = hi * steps.places + target
    put_stage(search, rest, hi, last, 1, own + 2)
    known_s = memo.seconds[state] if memo.fits[state] > 0 else np.inf
    if idle <= 1 and least_plan_s(search, own, passed) >= max(known_s, best.seconds[0]):
        return
    seconds = plan_s(search, own + 3)
    if known_s <= memo_s(search, own + 2, idle, seconds) and seconds >= best.seconds[0]:
        return
    if not fit_stage(search, steps.group[step], cut, hi, 2, own):
        return
    fitting = fit_stage(search, rest, hi, last, 1, own + 2)
    seconds = plan_s(search, own + 3)
    if fitting and seconds < best.seconds[0]:
        best.seconds[0] = seconds
        best.cut[0], best.place[0], best.step[0], best.end[0] = cut, place, step, hi
    judged_s, fits = memo_s(search, own + 2, idle, seconds), int(fitting)
    # One whose plan fits first, then the least seconds.
    if fits > memo.fits[state] or (fits == memo.fits[state] and judged_s < memo.seconds[state]):
        memo.cut[state], memo.place[state], memo.step[state] = cut, place, step
        memo.stages[state] = memo.stages[cut * steps.places + place] + 1
        memo.seconds[state], memo.fits[state] = judged_s, fits


def least_plan_s(search, own, passed):
    """What the closed form is not below: a round trip, or the slowest of all behind the first."""
    room, (whole_s, slowest_s) = search.room, passed
    for column in range(own, own + 3):
        column_s = room.forward_s[column] + room.backward_s[column]
        whole_s += column_s
        slowest_s = max(slowest_s, column_s)
    steady_s = (search.asked.micro_batches - 1) * slowest_s
    return max(whole_s, room.forward_s[0] + room.backward_s[0] + steady_s)


def plan_s(search, columns):
    """The closed form of so many stages and transfers."""
    room = search.room
    return latency_s(
        room.forward_s, room.backward_s, room.tail_s, columns, search.asked.micro_batches
    )


def memo_s(search, column, idle, seconds):
    """What a prefix is judged by: seconds, or as if rows were enough for all devices left."""
    if idle <= 1:
        return seconds
    room = search.room
    forward, backward = room.forward_s[column], room.backward_s[column]
    room.forward_s[column] /= idle
    room.backward_s[column] /= idle
    seconds = plan_s(search, column + 1)
    room.forward_s[column], room.backward_s[column] = forward, backward
    return seconds
