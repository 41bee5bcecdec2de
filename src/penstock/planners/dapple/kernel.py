"""DAPPLE's search over (layers planned, occupied devices), compiled by numba.

The algorithm in words is at `dapple.dapple`. A test compares it with a plain one of the same
recurrence.
"""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import Any, NamedTuple

import numpy as np

from penstock.flat_record import borrowed
from penstock.kernels import compiled
from penstock.plan.compiled_cost import (
    ALWAYS,
    AUTO,
    FULL,
    LOAD_TERMS,
    MOST_LOADS,
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
    """The inputs of the search.

    ``depths[k]`` are the micro-batches in flight of a stage with ``k`` stages from itself to the
    end. ``least_s`` are sums up to each cut of the least seconds of a row in each layer.
    """

    micro_batches: int
    size: int
    recompute: int
    most_stages: int
    depths: Integers
    least_s: Floats


class Memo(NamedTuple):
    """The best prefix of each state (cut and occupancy).

    ``cut`` and ``place`` are the state before its last ``step``. ``stages`` is how many stages it
    has. ``seconds`` are those of the plan by which it was compared, and ``fits`` says whether that
    plan fits: -1 where there is no prefix yet.
    """

    cut: Integers
    place: Integers
    step: Integers
    stages: Integers
    seconds: Floats
    fits: Integers


class Best(NamedTuple):
    """The best plan, in arrays of one entry: seconds, state before the last step, step, its end."""

    seconds: Floats
    cut: Integers
    place: Integers
    step: Integers
    end: Integers


class SearchWorkspace(NamedTuple):
    """Arrays for intermediate values.

    ``forward_s``, ``backward_s`` and ``tail_s`` have a column for each stage and transfer of a
    plan, in turn. ``down_s`` and ``up_s`` are the transfers at each cut from each step to a last
    stage behind it, where they are ``known``. ``owner``, ``counts`` and ``loads`` keep the loads of
    transfers between two steps in ``slots`` (`put_move`). ``busy`` is for `transfer_loads`.
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
    """All inputs, results and intermediate arrays of the search, as addresses."""

    costs: Any
    network: Any
    steps: Any
    inputs: Any
    memo: Any
    best: Any
    workspace: Any


def explored(
    costs: Costs, network: Network, steps: Steps, inputs: SearchInputs, limit_s: float
) -> tuple[Best, Memo]:
    """The best plan of at least two stages whose closed form is below ``limit_s``, and the memo.

    The last step is `NOWHERE` where there is none.
    """
    cuts, columns = costs.cuts, 2 * inputs.most_stages + 1
    cut, place, step = np.full((3, cuts, steps.places), NOWHERE)
    stages = np.zeros((cuts, steps.places), dtype=np.int64)
    memo = Memo(cut, place, step, stages, np.full(stages.shape, np.inf), np.full_like(stages, -1))
    best = Best(np.array([limit_s]), *(np.array([NOWHERE]) for _ in range(4)))
    slots = min(MOST_SLOTS, steps.steps * steps.widest)
    workspace = SearchWorkspace(
        np.zeros(columns),
        np.zeros(columns),
        np.zeros(columns),
        np.zeros(steps.steps, dtype=np.int64),
        np.empty(steps.steps * cuts),
        np.empty(steps.steps * cuts),
        slots,
        np.full(slots, NOWHERE),
        np.empty(2 * slots + 2, dtype=np.int64),
        np.empty((2 * slots + 2) * MOST_LOADS * LOAD_TERMS),
        np.zeros(LOAD_TERMS * resources(network)),
    )
    compiled(explore)(costs, network, steps, inputs, memo, best, workspace)
    return best, memo


def explore(
    costs: Costs,
    network: Network,
    steps: Steps,
    inputs: SearchInputs,
    memo: Memo,
    best: Best,
    workspace: SearchWorkspace,
) -> None:
    """Fill the memo from no layers to all of them."""
    search = SearchAddresses(
        borrowed(costs),
        borrowed(network),
        borrowed(steps),
        borrowed(inputs),
        borrowed(memo),
        borrowed(best),
        borrowed(workspace),
    )
    search.memo.fits[0] = 1
    for cut in range(costs.cuts - 1):
        for place in range(steps.places):
            state = cut * steps.places + place
            prefix_stages = search.memo.stages[state]
            if search.memo.fits[state] >= 0 and prefix_stages + 2 <= inputs.most_stages:
                expand(search, cut, place)


def expand(search, cut, place):
    """Try every next stage behind one prefix, with one last stage behind it."""
    steps, workspace, best, inputs = search.steps, search.workspace, search.best, search.inputs
    state = cut * steps.places + place
    columns = first_stages(search, cut, place)
    if columns < 0:
        return
    left_s = rest_s(search, cut, place)
    if (
        bound_s(workspace.forward_s, workspace.backward_s, columns, left_s, inputs.micro_batches)
        >= (best.seconds[0])
    ):
        return
    before_s = slowest_before_s = 0.0
    for column in range(columns):
        column_s = workspace.forward_s[column] + workspace.backward_s[column]
        before_s += column_s
        slowest_before_s = max(slowest_before_s, column_s)
    own = columns + 1 if columns else 0
    for step in range(steps.out[place], steps.out[place + 1]):
        if steps.group[step] >= 0:
            passed_s, slowest_s = before_s, slowest_before_s
            if columns:
                put_move(search, search.memo.step[state], step, cut, own - 1)
                moved_s = workspace.forward_s[own - 1] + workspace.backward_s[own - 1]
                passed_s += moved_s
                slowest_s = max(slowest_s, moved_s)
            if not workspace.known[step]:
                put_rest_moves(search, step)
            try_step(search, cut, place, step, own, passed_s, slowest_s)


def rest_s(search, cut, place):
    """Least seconds of the layers behind a cut on the devices that an occupancy leaves."""
    least_s = search.inputs.least_s
    left_s = (least_s[search.costs.cuts - 1] - least_s[cut]) * search.inputs.size
    return left_s / search.steps.speed_left[place]


def bound_s(forward_s, backward_s, stages, rest_s, micro_batches):
    """A lower bound of the closed form for all plans with these first stages.

    ``rest_s`` are the least seconds of the slowest later stage. If the pivot lies behind these
    stages, all of them count in the warm-up and ending phases. If it is one of them, no later stage
    is slower.
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
    """Put the stages of a prefix, with two more behind them, into their columns.

    Returns how many columns they take, or -1 where a stage does not fit.
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
    """Put a stage into a column, with recompute only if all stages recompute; see `fit_stage`."""
    costs, workspace, inputs = search.costs, search.workspace, search.inputs
    workspace.forward_s[column] = forward_s(costs, group, lo, hi)
    workspace.backward_s[column] = backward_s(costs, group, lo, hi)
    workspace.tail_s[column] = all_reduce_and_step_s(costs, group, lo, hi)
    if inputs.recompute == ALWAYS and inputs.depths[behind] > 1:
        workspace.backward_s[column] += workspace.forward_s[column]


def fit_stage(search, group, lo, hi, behind, column):
    """Whether a stage of `put_stage` fits. If it must recompute, add that to its column."""
    inputs, workspace = search.inputs, search.workspace
    depth = inputs.depths[behind]
    does = recomputes(search.costs, group, lo, hi, depth, inputs.recompute)
    if does == RECOMPUTES and inputs.recompute == AUTO and depth > 1:
        workspace.backward_s[column] += workspace.forward_s[column]
    return does != FULL


def put_move(search, before, step, cut, column):
    """Put the transfers at a cut between the stages of two consecutive steps into a column."""
    workspace, steps = search.workspace, search.steps
    pair = before * steps.widest + step - steps.out[steps.target[before]]
    slot = pair % workspace.slots
    if workspace.owner[slot] != pair:
        workspace.owner[slot] = pair
        put_loads(search, slot, before, steps.steps + step)
    workspace.forward_s[column], workspace.backward_s[column] = moves_s(search, slot, cut)
    workspace.tail_s[column] = 0.0


def put_rest_moves(search, step):
    """The transfers at every cut from a step's stage to a last stage behind it."""
    workspace, steps, cuts = search.workspace, search.steps, search.costs.cuts
    put_loads(search, workspace.slots, step, 2 * steps.steps + steps.target[step])
    for cut in range(cuts):
        place = step * cuts + cut
        workspace.down_s[place], workspace.up_s[place] = moves_s(search, workspace.slots, cut)
    workspace.known[step] = 1


def put_loads(search, slot, sender, receiver):
    """The loads of the transfers there and back between two groups."""
    network, workspace = search.network, search.workspace
    down, up = 2 * slot, 2 * slot + 1
    each = MOST_LOADS * LOAD_TERMS
    workspace.counts[down] = transfer_loads(
        network, sender, receiver, workspace.busy, workspace.loads, down * each
    )
    workspace.counts[up] = transfer_loads(
        network, receiver, sender, workspace.busy, workspace.loads, up * each
    )


def moves_s(search, slot, cut):
    """Seconds of the transfers at a cut: of activations, and of their gradients."""
    costs, workspace = search.costs, search.workspace
    down, up = 2 * slot, 2 * slot + 1
    each = MOST_LOADS * LOAD_TERMS
    fixed, per_row = costs.down_fixed[cut], costs.down_each[cut]
    down_s = load_s(workspace.loads, down * each, workspace.counts[down], fixed, per_row)
    fixed, per_row = costs.up_fixed[cut], costs.up_each[cut]
    return down_s, load_s(workspace.loads, up * each, workspace.counts[up], fixed, per_row)


def try_step(search, cut, place, step, own, passed_s, slowest_s):
    """Try every end of a next stage behind a prefix.

    ``passed_s`` sums the columns of the prefix, and ``slowest_s`` is its slowest column.
    """
    steps, workspace, best, cuts = search.steps, search.workspace, search.best, search.costs.cuts
    steady, target = search.inputs.micro_batches - 1, steps.target[step]
    for hi in range(cut + 1, cuts - 1):
        left_s = rest_s(search, hi, target)
        if steady * left_s >= best.seconds[0]:
            continue
        put_stage(search, steps.group[step], cut, hi, 2, own)
        own_s = workspace.forward_s[own] + workspace.backward_s[own]
        slowest = max(slowest_s, own_s)
        if max(passed_s + own_s, slowest * steady) >= best.seconds[0]:
            break
        least_s = workspace.forward_s[0] + workspace.backward_s[0] + steady * max(slowest, left_s)
        if max(passed_s + own_s + left_s, least_s) < best.seconds[0]:
            move = step * cuts + hi
            workspace.forward_s[own + 1], workspace.backward_s[own + 1] = (
                workspace.down_s[move],
                workspace.up_s[move],
            )
            workspace.tail_s[own + 1] = 0.0
            try_last_stage(search, cut, place, step, hi, own, (passed_s, slowest_s))


def try_last_stage(search, cut, place, step, hi, own, passed):
    """Compare a prefix (the first columns) with a next stage and one last stage behind it."""
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
    # A plan that fits is better than one that does not; then the least seconds count.
    if fits > memo.fits[state] or (fits == memo.fits[state] and judged_s < memo.seconds[state]):
        memo.cut[state], memo.place[state], memo.step[state] = cut, place, step
        memo.stages[state] = memo.stages[cut * steps.places + place] + 1
        memo.seconds[state], memo.fits[state] = judged_s, fits


def least_plan_s(search, own, passed):
    """A lower bound of the closed form: a round trip, or the steady phase of the slowest column."""
    workspace, (whole_s, slowest_s) = search.workspace, passed
    for column in range(own, own + 3):
        column_s = workspace.forward_s[column] + workspace.backward_s[column]
        whole_s += column_s
        slowest_s = max(slowest_s, column_s)
    steady_s = (search.inputs.micro_batches - 1) * slowest_s
    return max(whole_s, workspace.forward_s[0] + workspace.backward_s[0] + steady_s)


def plan_s(search, columns):
    """The closed form of so many stages and transfers."""
    workspace = search.workspace
    return latency_s(
        workspace.forward_s,
        workspace.backward_s,
        workspace.tail_s,
        columns,
        search.inputs.micro_batches,
    )


def memo_s(search, column, idle, seconds):
    """Seconds by which a prefix is compared: as if rows were enough for all devices left."""
    if idle <= 1:
        return seconds
    workspace = search.workspace
    forward, backward = workspace.forward_s[column], workspace.backward_s[column]
    workspace.forward_s[column] /= idle
    workspace.backward_s[column] /= idle
    seconds = plan_s(search, column + 1)
    workspace.forward_s[column], workspace.backward_s[column] = forward, backward
    return seconds
