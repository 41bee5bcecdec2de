"""Loops that fill the gaps of an order with W, and that rearrange a V-shaped order.

Both play the pipeline as `penstock.schedule.clock` does, and choose actions on the way. An action
is coded as one number: ``row * cells + stage * micro_batches + micro_batch``, where ``row`` is 0
for F, 1 for I and 2 for W, and ``cells`` is ``stages * micro_batches``. Each loop runs as plain
Python for few actions and compiled for many.
"""


# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from penstock import kernels

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic
from penstock.flat_record import borrowed

__all__ = ["LoopCosts", "filled", "loop", "rearranged"]


class LoopCosts(NamedTuple):
    """Seconds and limits of a pipeline, as lists or arrays.

    An action takes ``seconds[row * stages + s]``, a transfer from stage ``s`` to the next or back
    ``transfer[s]``. The limits are ``most[g]`` micro-batches of group ``g`` until their W, over all
    its stages; ``limit[s]`` micro-batches of stage ``s``; and ``memory[g]`` bytes. ``saved[s]`` and
    ``kept[s]`` are the bytes of a micro-batch from F on, and between I and W.
    """

    micro_batches: int
    stages: int
    groups: int
    seconds: Any
    transfer: Any
    slack: float
    most: Any
    limit: Any
    memory: Any
    saved: Any
    kept: Any


def filled(costs, first, actions, home, out):
    """Play fixed orders of F and I, insert W where they delay nothing, and return the makespan.

    ``actions[first[g]:first[g + 1]]`` is the order of group ``g``. Its order with W is written to
    ``out`` from ``3 * first[g] / 2`` on. ``home[s]`` is the group of stage ``s``. A group runs its
    oldest pending W in two cases: while it waits, if the W ends before the wait does (within
    ``slack`` seconds); and when a forward would exceed a limit. The result is infinite if an order
    exceeds a limit even with every W run at once, or if it deadlocks.
    """
    micro_batches, seconds, slack = costs.micro_batches, costs.seconds, costs.slack
    groups, stages = costs.groups, costs.stages
    cells = stages * micro_batches
    ends = [inf for _ in range(2 * cells)]
    reached = [first[g] for g in range(groups)]
    free = [0.0 for _ in range(groups)]
    load = empty_load(groups, stages)
    waiting = [0 for _ in range(cells)]
    head = [first[g] // 2 for g in range(groups)]
    tail = [first[g] // 2 for g in range(groups)]
    put = [3 * first[g] // 2 for g in range(groups)]
    todo = [g for g in range(groups)]
    while len(todo) > 0:
        g = todo.pop()
        while reached[g] < first[g + 1]:
            action = actions[reached[g]]
            cell = action % cells
            s = cell // micro_batches
            forward = action < cells
            ready = ready_at(forward, s, cell, ends, costs)
            if ready == inf:
                break
            while head[g] < tail[g]:
                of = waiting[head[g]] // micro_batches
                waits = forward and full(g, s, load, costs)
                if not waits and free[g] + seconds[2 * stages + of] > ready + slack:
                    break
                out[put[g]] = 2 * cells + waiting[head[g]]
                put[g] += 1
                free[g] += seconds[2 * stages + of]
                head[g] += 1
                let_go(g, of, load, costs)
            if forward and full(g, s, load, costs):
                return inf
            out[put[g]] = action
            put[g] += 1
            reached[g] += 1
            free[g] = max(free[g], ready) + seconds[action // cells * stages + s]
            ends[action] = free[g]
            take_in(g, s, forward, load, costs)
            if forward:
                if s + 1 < stages:
                    todo.append(home[s + 1])
            else:
                waiting[tail[g]] = cell
                tail[g] += 1
                if s > 0:
                    todo.append(home[s - 1])
    last = 0.0
    for g in range(groups):
        if reached[g] < first[g + 1]:
            return inf
        for i in range(head[g], tail[g]):
            out[put[g]] = 2 * cells + waiting[i]
            put[g] += 1
            free[g] += seconds[2 * stages + waiting[i] // micro_batches]
        last = max(last, free[g])
    return last


def ready_at(forward, s, cell, ends, costs):
    """When F or I of a cell of stage ``s`` can start; infinite while that is not known."""
    micro_batches, transfer = costs.micro_batches, costs.transfer
    if forward:
        return ends[cell - micro_batches] + transfer[s - 1] if s > 0 else 0.0
    after = cell + micro_batches
    if len(ends) // 2 <= after:
        return ends[cell]
    return max(ends[cell], ends[len(ends) // 2 + after] + transfer[s])


def empty_load(groups, stages):
    """Counts of what is held: micro-batches by group and stage, bytes by group, on the way down."""
    return (
        [0 for _ in range(groups)],
        [0 for _ in range(stages)],
        [0.0 for _ in range(groups)],
        [0.0 for _ in range(groups)],
    )


def full(g, s, load, costs):
    """Whether a forward on stage ``s`` of group ``g`` would exceed a limit."""
    held, in_flight, level, _ = load
    return (
        held[g] + 1 > costs.most[g]
        or in_flight[s] + 1 > costs.limit[s]
        or level[g] + costs.saved[s] > costs.memory[g]
    )


def take_in(g, s, forward, load, costs):
    """Count F, or I, on stage ``s`` of group ``g`` as done."""
    held, in_flight, level, level_down = load
    more = costs.saved[s] if forward else costs.kept[s] - costs.saved[s]
    level[g] += more
    if 2 * s < costs.stages:
        level_down[g] += more
    if forward:
        held[g] += 1
        in_flight[s] += 1


def let_go(g, s, load, costs):
    """Count a W on stage ``s`` of group ``g`` as done."""
    held, in_flight, level, level_down = load
    held[g] -= 1
    in_flight[s] -= 1
    level[g] -= costs.kept[s]
    if 2 * s < costs.stages:
        level_down[g] -= costs.kept[s]


def rearranged(costs, rank, deepest, patient, out):
    """Orders of F and I in which a group never waits for one action while another can run.

    Group ``g`` of a V holds stages ``g`` and ``2 p - 1 - g``. A free group looks at the next F and
    the next I of both stages, and starts the one with the least ``rank[action]`` among those that
    can start. It runs a W if that one is a forward beyond a limit (as in `filled`), or if none can
    start. If ``patient``, it waits where the W would end after an arrival that is already known.

    A stage on the way down has at most ``deepest[g]`` micro-batches between F and I. This is less
    than ``most[g]``, and bytes are reserved likewise. So the stage on the way up can always run,
    and the oldest micro-batch can always proceed. The order of each group is written to ``out``.
    """
    micro_batches, seconds, slack = costs.micro_batches, costs.seconds, costs.slack
    stages, groups = costs.stages, costs.groups
    cells = stages * micro_batches
    ends = [inf for _ in range(2 * cells)]
    done = [0 for _ in range(2 * stages)]
    load = empty_load(groups, stages)
    waiting = [0 for _ in range(cells)]
    head = [2 * micro_batches * g for g in range(groups)]
    tail = [2 * micro_batches * g for g in range(groups)]
    put = [4 * micro_batches * g for g in range(groups)]
    # When each group looks for work next, infinite where it has none. Looking through all groups
    # is fast enough; a heap takes half a second to compile.
    look = [0.0 for _ in range(groups)]
    idle = [False for _ in range(groups)]
    while True:
        g = 0
        for other in range(1, groups):
            if look[other] < look[g]:
                g = other
        now = look[g]
        if now == inf:
            break
        weights = head[g] < tail[g]
        best, wake = choice(now + slack, g, weights, (rank, deepest), (ends, done, load), costs)
        if best < 0 and weights:
            w = seconds[2 * stages + waiting[head[g]] // micro_batches]
            if not patient or now + w <= wake + slack:
                best = 2 * cells
        idle[g] = best < 0
        if best < 0:
            look[g] = wake
            continue
        if best == 2 * cells:
            s = waiting[head[g]] // micro_batches
            head[g] += 1
            let_go(g, s, load, costs)
            look[g] = now + seconds[2 * stages + s]
            continue
        row, cell = best // cells, best % cells
        s = cell // micro_batches
        done[row * stages + s] += 1
        out[put[g]] = best
        put[g] += 1
        look[g] = ends[best] = now + seconds[row * stages + s]
        take_in(g, s, row == 0, load, costs)
        neighbour = s + 1 if row == 0 else s - 1
        if row == 1:
            waiting[tail[g]] = cell
            tail[g] += 1
        if 0 <= neighbour < stages:
            at = min(neighbour, stages - 1 - neighbour)
            arrives = look[g] + costs.transfer[min(s, neighbour)]
            if at != g and idle[at] and arrives < look[at]:
                look[at] = arrives


def choice(now, g, weights, rules, state, costs):
    """The F or I that group ``g`` starts now, and when the first of the others can start.

    Returns -1 if there is none, and ``2 * cells`` if a W must run first; ``weights`` says that one
    is pending. ``rules`` are the rank of every action and the greatest depth of every group.
    """
    (rank, deepest), (ends, done, load) = rules, state
    micro_batches, saved, level_down = costs.micro_batches, costs.saved, load[3]
    stages = costs.stages
    cells = stages * micro_batches
    best, best_rank, wake = -1, inf, inf
    for lane in range(4):
        row = lane // 2
        s = g if lane % 2 == 0 else stages - 1 - g
        down = 2 * s < stages
        if done[row * stages + s] == micro_batches:
            continue
        if row == 0 and down and done[s] - done[stages + s] >= deepest[g]:
            continue
        cell = s * micro_batches + done[row * stages + s]
        ready = ready_at(row == 0, s, cell, ends, costs)
        if ready > now:
            wake = min(wake, ready)
        elif rank[row * cells + cell] < best_rank:
            waits = row == 0 and (
                full(g, s, load, costs)
                or (down and level_down[g] + saved[s] + saved[stages - 1 - s] > costs.memory[g])
            )
            if not waits:
                best, best_rank = row * cells + cell, rank[row * cells + cell]
            elif weights:
                best, best_rank = 2 * cells, rank[row * cells + cell]
    return best, wake


LOOPS: dict[str, Callable[..., Any]] = {"filled": filled, "rearranged": rearranged}


def loop(name: str, *, compiled: bool) -> Callable[..., Any]:
    """The loop of this name, as plain Python or compiled."""
    if not compiled:
        return LOOPS[name]
    # It loads numba, which takes longer than a few actions in plain Python.
    from penstock.schedule.families.zero_bubble_loop import LOOPS_ON_ARRAYS

    return kernels.compiled(LOOPS_ON_ARRAYS[name])


def filled_in_arrays(costs, first, actions, home, out):
    """`filled`, to be compiled."""
    return filled(borrowed(costs), borrowed(first), borrowed(actions), borrowed(home), out)


def rearranged_in_arrays(costs, rank, deepest, patient, out):
    """`rearranged`, to be compiled."""
    rearranged(borrowed(costs), borrowed(rank), borrowed(deepest), patient, out)


LOOPS_ON_ARRAYS: dict[str, Callable[..., Any]] = {
    "filled": filled_in_arrays,
    "rearranged": rearranged_in_arrays,
}
