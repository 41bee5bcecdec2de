"""Loops that put W into the gaps of an order, and that change a V-shaped order to leave fewer.

Both play the pipeline as `penstock.schedule.clock` does, and choose as they go. An action is one
number: its row (0 for F, 1 for I, 2 for W) times ``stages * micro_batches``, plus stage times
``micro_batches``, plus micro-batch. Each loop runs as it is for few actions, compiled for many.
"""

# numba has no types: its decorator makes every compiled function unknown to a strict checker.
# pyright: basic

from collections.abc import Callable
from functools import cache
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

__all__ = ["loop"]


def filled(
    micro_batches, first, actions, home, seconds, way, slack, most, limit, room, saved, kept, out
):
    """Play fixed orders of F and I, with each W where it delays nothing; the makespan.

    ``actions[first[g]:first[g + 1]]`` is the order of group ``g``; with its W it is written to
    ``out`` from one and a half times ``first[g]`` on. A group runs the oldest W that is left while
    it waits, if that ends before the wait does (give or take ``slack`` seconds), or if a forward
    would hold more than ``most[g]`` micro-batches of all stages of the group until their W, more
    than ``limit[s]`` of stage ``s``, or more than ``room[g]`` bytes. Infinite if an order asks for
    more than that even with every W at once, or deadlocks.

    ``home[s]`` is the group of stage ``s``, ``seconds[row * stages + s]`` what an action takes,
    ``way[s]`` the way to the next stage and back, ``saved[s]`` and ``kept[s]`` the bytes of a
    micro-batch from F on, and between I and W.
    """
    groups, stages = len(first) - 1, len(home)
    cells = stages * micro_batches
    ends = [inf for _ in range(2 * cells)]
    reached = [first[g] for g in range(groups)]
    free = [0.0 for _ in range(groups)]
    held = [0 for _ in range(groups)]
    level = [0.0 for _ in range(groups)]
    in_flight = [0 for _ in range(stages)]
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
            if forward:
                ready = ends[cell - micro_batches] + way[s - 1] if s > 0 else 0.0
            else:
                ready = ends[cell]
                if s + 1 < stages:
                    ready = max(ready, ends[cells + cell + micro_batches] + way[s])
            if ready == inf:
                break
            while head[g] < tail[g]:
                full = forward and (
                    held[g] + 1 > most[g]
                    or in_flight[s] + 1 > limit[s]
                    or level[g] + saved[s] > room[g]
                )
                of = waiting[head[g]] // micro_batches
                if not full and free[g] + seconds[2 * stages + of] > ready + slack:
                    break
                out[put[g]] = 2 * cells + waiting[head[g]]
                put[g] += 1
                head[g] += 1
                free[g] += seconds[2 * stages + of]
                held[g] -= 1
                level[g] -= kept[of]
                in_flight[of] -= 1
            if forward and (
                held[g] + 1 > most[g]
                or in_flight[s] + 1 > limit[s]
                or level[g] + saved[s] > room[g]
            ):
                return inf
            out[put[g]] = action
            put[g] += 1
            reached[g] += 1
            free[g] = max(free[g], ready) + seconds[action // cells * stages + s]
            ends[action] = free[g]
            if forward:
                held[g] += 1
                level[g] += saved[s]
                in_flight[s] += 1
                if s + 1 < stages:
                    todo.append(home[s + 1])
            else:
                level[g] -= saved[s] - kept[s]
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


def rearranged(
    micro_batches, rank, deepest, patient, seconds, way, slack, most, limit, room, saved, kept, out
):
    """Orders of F and I in which a group does not wait for the action that ranks next.

    Group ``g`` of a V holds stage ``g`` and stage ``2 p - 1 - g``. Whenever it is free it takes,
    of the next F and I of both stages that can start, the one with the least ``rank[action]``;
    where that is a forward without room (as in `filled`), or where there is none, a W. If
    ``patient`` it rather waits where W would end after something that is seen to come.

    On its way down the V a stage has at most ``deepest[g]`` micro-batches between F and I; as this
    is less than ``most[g]``, and bytes are kept free likewise, there is always room for the way up,
    and the oldest micro-batch can always go on. Writes the order of each group to ``out``.
    """
    stages = len(saved)
    groups = stages // 2
    cells = stages * micro_batches
    ends = [inf for _ in range(2 * cells)]
    done = [0 for _ in range(2 * stages)]
    held = [0 for _ in range(groups)]
    level = [0.0 for _ in range(groups)]
    level_down = [0.0 for _ in range(groups)]
    in_flight = [0 for _ in range(stages)]
    waiting = [0 for _ in range(cells)]
    head = [2 * micro_batches * g for g in range(groups)]
    tail = [2 * micro_batches * g for g in range(groups)]
    put = [4 * micro_batches * g for g in range(groups)]
    # When a group next looks for work, and whether it idles until then; older entries are stale.
    look = [0.0 for _ in range(groups)]
    idle = [False for _ in range(groups)]
    coming = [(0.0, g) for g in range(groups)]
    heapify(coming)
    while len(coming) > 0:
        now, g = heappop(coming)
        if now != look[g]:
            continue
        best, best_rank, wake = -1, inf, inf
        for lane in range(4):
            row = lane // 2
            s = g if lane % 2 == 0 else stages - 1 - g
            if done[row * stages + s] == micro_batches:
                continue
            cell = s * micro_batches + done[row * stages + s]
            if row == 0:
                ready = ends[cell - micro_batches] + way[s - 1] if s > 0 else 0.0
                if s < groups and done[s] - done[stages + s] >= deepest[g]:
                    continue
            else:
                ready = ends[cell]
                if s + 1 < stages:
                    ready = max(ready, ends[cells + cell + micro_batches] + way[s])
            if ready > now + slack:
                wake = min(wake, ready)
            elif rank[row * cells + cell] < best_rank:
                full = row == 0 and (
                    held[g] + 1 > most[g]
                    or in_flight[s] + 1 > limit[s]
                    or level[g] + saved[s] > room[g]
                    or (s < groups and level_down[g] + saved[s] + saved[stages - 1 - s] > room[g])
                )
                if not full:
                    best, best_rank = row * cells + cell, rank[row * cells + cell]
                elif head[g] < tail[g]:
                    best, best_rank = 2 * cells, rank[row * cells + cell]
        if best < 0 and head[g] < tail[g]:
            w = seconds[2 * stages + waiting[head[g]] // micro_batches]
            if not patient or now + w <= wake + slack:
                best = 2 * cells
        idle[g] = best < 0
        if best < 0:
            look[g] = wake
            if wake < inf:
                heappush(coming, (wake, g))
            continue
        if best == 2 * cells:
            s = waiting[head[g]] // micro_batches
            head[g] += 1
            held[g] -= 1
            in_flight[s] -= 1
            level[g] -= kept[s]
            if s < groups:
                level_down[g] -= kept[s]
            look[g] = now + seconds[2 * stages + s]
            heappush(coming, (look[g], g))
            continue
        row, cell = best // cells, best % cells
        s = cell // micro_batches
        done[row * stages + s] += 1
        out[put[g]] = best
        put[g] += 1
        look[g] = ends[best] = now + seconds[row * stages + s]
        heappush(coming, (look[g], g))
        freed = saved[s] if row == 0 else kept[s] - saved[s]
        level[g] += freed
        if s < groups:
            level_down[g] += freed
        neighbour = s + 1 if row == 0 else s - 1
        if row == 0:
            held[g] += 1
            in_flight[s] += 1
        else:
            waiting[tail[g]] = cell
            tail[g] += 1
        if 0 <= neighbour < stages:
            at = min(neighbour, stages - 1 - neighbour)
            arrives = look[g] + way[min(s, neighbour)]
            if at != g and idle[at] and arrives < look[at]:
                look[at] = arrives
                heappush(coming, (arrives, at))


LOOPS: dict[str, Callable[..., Any]] = {"filled": filled, "rearranged": rearranged}


def loop(name: str, *, compiled: bool) -> Callable[..., Any]:
    """A loop of this file by its name, as it is or compiled."""
    return compiled_loop(name) if compiled else LOOPS[name]


@cache
def compiled_loop(name: str) -> Callable[..., Any]:
    """A loop of this file, compiled when first asked for: loading numba takes a while."""
    import numba

    return numba.njit(cache=True)(LOOPS[name])
