"""Hill climbing over cuts, replica counts, stages and devices by a fast estimate."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np

from penstock.kernels import copy_into
from penstock.search.arrays import Integers, SearchArrays
from penstock.search.estimate import estimate

__all__ = ["climb"]

LEAST_GAIN = 1e-9
"""Smaller improvements are rounding."""


def rebalance(a, cuts, starts, first, last, batch):
    """Cut the layers of stages ``first`` to ``last`` in proportion to their devices."""
    lo, hi = cuts[first], cuts[last + 1]
    power = starts[last + 1] - starts[first]
    start = a.forward[0, lo] + a.backward[0, lo] + batch * (a.forward[1, lo] + a.backward[1, lo])
    end = a.forward[0, hi] + a.backward[0, hi] + batch * (a.forward[1, hi] + a.backward[1, hi])
    layer = lo
    for s in range(first, last):
        part = (starts[s + 1] - starts[first]) / power
        goal = start + part * (end - start)
        layer += 1
        most = hi - (last - s)
        before = np.inf
        while layer < most:
            here = abs(
                a.forward[0, layer]
                + a.backward[0, layer]
                + batch * (a.forward[1, layer] + a.backward[1, layer])
                - goal
            )
            if here > before:
                layer -= 1
                break
            before = here
            layer += 1
        layer = max(layer, cuts[s] + 1)
        cuts[s + 1] = min(layer, most)
        layer = cuts[s + 1]


def accepted(a, trial, best, counts, shape, way, found, marks):
    """Estimate the trial; where it is better it becomes the best, else it is undone."""
    order, cuts, starts = trial
    best_order, best_cuts, best_starts = best
    batch, micro_batches = shape
    depth, recompute = marks
    counts[1] -= 1
    seconds = estimate(
        a, order, cuts, starts, counts[2], batch, micro_batches, way, depth, recompute
    )
    if seconds < found[0] * (1 - LEAST_GAIN):
        found[0] = seconds
        counts[0] = counts[2]
        copy_into(best_order, order)
        copy_into(best_cuts, cuts)
        copy_into(best_starts, starts)
        return True
    undo(trial, best, counts)
    return False


def undo(trial, best, counts):
    """Let the trial be the best again."""
    copy_into(trial[0], best[0])
    copy_into(trial[1], best[1])
    copy_into(trial[2], best[2])
    counts[2] = counts[0]


def move_cuts(a, trial, best, counts, shape, way, found, marks):
    """Move each cut by 1, 2, 4, ... layers."""
    gained = False
    for s in range(1, counts[0]):
        step = 1
        while step < best[1][s + 1] - best[1][s - 1] and counts[1] > 0:
            for sign in (1, -1):
                cut = best[1][s] + sign * step
                if best[1][s - 1] < cut < best[1][s + 1]:
                    trial[1][s] = cut
                    gained |= accepted(a, trial, best, counts, shape, way, found, marks)
            step *= 2
    return gained


def shift_replicas(a, trial, best, counts, shape, way, found, marks):
    """Take 1, 2, 4, ... devices from a stage, give them to another, or to none (-1)."""
    gained = False
    stages = counts[0]
    for i in range(-1, stages):
        for j in range(-1, stages):
            if i == j or (stages > 24 and i >= 0 and j >= 0 and abs(i - j) > 2):
                continue
            step = 1
            while counts[1] > 0:
                unused = len(best[0]) - best[2][stages]
                have = unused if i < 0 else best[2][i + 1] - best[2][i] - 1
                if step > have:
                    break
                for again in (False, True):
                    for s in range(stages + 1):
                        if 0 <= i < s:
                            trial[2][s] -= step
                        if 0 <= j < s:
                            trial[2][s] += step
                    if again:
                        low = min(i, j) if min(i, j) >= 0 else max(0, max(i, j) - 1)
                        rebalance(a, trial[1], trial[2], low, max(i, j), shape[0])
                    if accepted(a, trial, best, counts, shape, way, found, marks):
                        gained = True
                        break
                step *= 2
    return gained


def merge_and_split(a, trial, best, counts, shape, way, found, marks):
    """Join neighbouring stages; cut a stage in two, with its devices shared out."""
    gained = False
    s = 0
    while s + 1 < counts[0] and counts[1] > 0:
        for k in range(s + 1, counts[0]):
            trial[1][k] = best[1][k + 1]
            trial[2][k] = best[2][k + 1]
        counts[2] = counts[0] - 1
        gained |= accepted(a, trial, best, counts, shape, way, found, marks)
        s += 1
    s = 0
    while s < counts[0] and counts[0] + 1 < len(best[1]) and counts[1] > 0:
        width = best[2][s + 1] - best[2][s]
        if width > 1 and best[1][s + 1] - best[1][s] > 1:
            given = 1
            while given < width and counts[1] > 0:
                for k in range(counts[0], s, -1):
                    trial[1][k + 1] = best[1][k]
                    trial[2][k + 1] = best[2][k]
                trial[2][s + 1] = best[2][s] + given
                trial[1][s + 1] = best[1][s] + 1
                counts[2] = counts[0] + 1
                rebalance(a, trial[1], trial[2], s, s + 1, shape[0])
                if accepted(a, trial, best, counts, shape, way, found, marks):
                    gained = True
                    break
                given = given + 1 if width <= 8 else given * 2
        s += 1
    return gained


def swap_devices(a, trial, best, counts, shape, way, found, marks):
    """Exchange two devices that differ in kind or host, of different stages or unused."""
    gained = False
    devices = len(best[0])
    stages = counts[0]
    stage_of = np.full(devices, -1, dtype=np.int64)
    for s in range(stages):
        stage_of[best[2][s] : best[2][s + 1]] = s
    for i in range(devices):
        for j in range(i + 1, devices):
            if counts[1] <= 0:
                return gained
            x, y = best[0][i], best[0][j]
            if stage_of[i] == stage_of[j]:
                continue
            if (
                a.host[x] == a.host[y]
                and a.speed[x] == a.speed[y]
                and a.memory[x] == a.memory[y]
                and same_links(a, x, y)
            ):
                continue
            trial[0][i] = y
            trial[0][j] = x
            gained |= accepted(a, trial, best, counts, shape, way, found, marks)
    return gained


def same_links(a, x, y):
    """Whether two devices reach all others alike."""
    for z in range(len(a.speed)):
        differs = a.bandwidth[x, z] != a.bandwidth[y, z] or a.bandwidth[z, x] != a.bandwidth[z, y]
        if differs and z != x and z != y:
            return False
    return a.bandwidth[x, y] == a.bandwidth[y, x]


def swap_stage_devices(a, trial, best, counts, shape, way, found, marks):
    """Exchange the devices of two neighbouring stages, widths and all, with layers rebalanced."""
    gained = False
    for s in range(counts[0] - 1):
        for again in (False, True):
            if counts[1] <= 0:
                return gained
            lo, middle, hi = best[2][s], best[2][s + 1], best[2][s + 2]
            copy_into(trial[0][lo:], best[0][middle:hi])
            copy_into(trial[0][lo + hi - middle :], best[0][lo:middle])
            trial[2][s + 1] = lo + hi - middle
            if again:
                rebalance(a, trial[1], trial[2], s, s + 1, shape[0])
            gained |= accepted(a, trial, best, counts, shape, way, found, marks)
    return gained


def climb(
    a: SearchArrays,
    order: Integers,
    cuts: Integers,
    starts: Integers,
    stages: int,
    shape: tuple[int, int],
    way: tuple[int, int, int, int],
    budget: int,
    swaps: bool,
) -> tuple[float, int, int]:
    """Improve a plan in place until no move helps or ``budget`` estimates are spent.

    ``cuts`` and ``starts`` have room for one entry more than the most stages. ``shape`` is
    (micro-batch size, micro-batches), ``way`` as in `estimate`. Returns seconds, stages, and the
    estimates left.
    """
    best = (order, cuts, starts)
    trial = (order.copy(), cuts.copy(), starts.copy())
    marks = (np.zeros(len(cuts), dtype=np.int64), np.zeros(len(cuts), dtype=np.int64))
    counts = np.array([stages, budget, stages])
    found = np.array([np.inf])
    accepted(a, trial, best, counts, shape, way, found, marks)
    undo(trial, best, counts)
    gained = True
    while gained and counts[1] > 0:
        gained = move_cuts(a, trial, best, counts, shape, way, found, marks)
        gained |= shift_replicas(a, trial, best, counts, shape, way, found, marks)
        gained |= merge_and_split(a, trial, best, counts, shape, way, found, marks)
        if swaps:
            gained |= swap_devices(a, trial, best, counts, shape, way, found, marks)
            gained |= swap_stage_devices(a, trial, best, counts, shape, way, found, marks)
    return found[0], counts[0], counts[1]
