"""Simulated annealing over cuts, replicas and devices by the load of a plan, compiled by numba."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

import numpy as np

from penstock.kernels import copy_into
from penstock.search.arrays import Integers, Reals, SearchArrays
from penstock.search.load import load_s

__all__ = ["wander"]

COLD = 1e-4
"""Slower plans than this are never taken at the end."""

AGAIN = 0.3
"""Probability that a move is followed by another one before the plan is judged."""


def move_cut(cuts, stages):
    """One cut by some layers, few more often than many."""
    if stages > 1:
        place = 1 + np.random.randint(stages - 1)
        step = int(2 ** (np.random.random() * 3.6))
        cut = cuts[place] + (step if np.random.random() < 0.5 else -step)
        if cuts[place - 1] < cut < cuts[place + 1]:
            cuts[place] = cut


def swap_devices(order):
    """Two devices, wherever they are."""
    i, j = np.random.randint(len(order)), np.random.randint(len(order))
    order[i], order[j] = order[j], order[i]


def move_device(order, starts, stages):
    """One device to another stage, to none, or from none."""
    place = np.random.randint(len(order))
    giver = stages
    for s in range(stages):
        if starts[s] <= place < starts[s + 1]:
            giver = s
    taker = np.random.randint(stages + 1)
    if giver == taker or (giver < stages and starts[giver + 1] - starts[giver] < 2):
        return
    device = order[place]
    if giver < taker:
        end = starts[taker + 1] if taker < stages else len(order)
        for k in range(place, end - 1):
            order[k] = order[k + 1]
        order[end - 1] = device
        for s in range(giver + 1, min(taker, stages) + 1):
            starts[s] -= 1
    else:
        first = starts[taker + 1] if taker < stages else starts[stages]
        for k in range(place, first, -1):
            order[k] = order[k - 1]
        order[first] = device
        for s in range(taker + 1, min(giver, stages) + 1):
            starts[s] += 1


def join(cuts, starts, stages):
    """Two neighbouring stages; the stages left."""
    if stages < 2:
        return stages
    place = 1 + np.random.randint(stages - 1)
    for s in range(place, stages):
        cuts[s], starts[s] = cuts[s + 1], starts[s + 1]
    return stages - 1


def split(order, cuts, starts, stages, most):
    """A stage in two, with its devices shared out or a further one; the stages there are."""
    place = np.random.randint(stages)
    lo, hi = cuts[place], cuts[place + 1]
    if hi - lo < 2 or stages == most:
        return stages
    width = starts[place + 1] - starts[place]
    spare = len(order) - starts[stages]
    taken = 0
    if spare > 0 and (width < 2 or np.random.random() < 0.5):
        device = order[starts[stages]]
        for k in range(starts[stages], starts[place + 1], -1):
            order[k] = order[k - 1]
        order[starts[place + 1]] = device
        taken, given = 1, width
    elif width > 1:
        given = 1 + np.random.randint(width - 1)
    else:
        return stages
    for s in range(stages, place, -1):
        cuts[s + 1], starts[s + 1] = cuts[s], starts[s] + taken
    cuts[place + 1] = lo + 1 + np.random.randint(hi - lo - 1)
    starts[place + 1] = starts[place] + given
    return stages + 1


def move(order, cuts, starts, stages, most, size, sizes):
    """One random move, or several; the stages and the number of the size after it."""
    while True:
        drawn = np.random.random()
        if drawn < 0.35:
            move_cut(cuts, stages)
        elif drawn < 0.5:
            swap_devices(order)
        elif drawn < 0.7:
            move_device(order, starts, stages)
        elif drawn < 0.8:
            stages = join(cuts, starts, stages)
        elif drawn < 0.95:
            stages = split(order, cuts, starts, stages, most)
        else:
            size += 1 if np.random.random() < 0.5 else -1
            size = min(max(size, 0), sizes - 1)
        if np.random.random() >= AGAIN:
            return stages, size


def wander(
    a: SearchArrays,
    order: Integers,
    cuts: Integers,
    starts: Integers,
    stages: int,
    sizes: Integers,
    size: int,
    batch: int,
    recompute: int,
    power: float,
    heat: float,
    steps: int,
    seed: int,
) -> tuple[Reals, Integers, Integers, Integers, Integers]:
    """The best plan of each micro-batch size on a random walk (Kirkpatrick et al., Science 1983).

    ``sizes``: the micro-batch sizes, ``size`` the number of the first one's; ``cuts`` and
    ``starts`` have room for one entry more than the most stages. Returns for each size the least
    `load_s`, stages, order, cuts and starts.
    """
    np.random.seed(seed)
    count, most = len(sizes), len(cuts) - 1
    found_s, found_stages = np.full(count, np.inf), np.zeros(count, dtype=np.int64)
    found_order = np.zeros((count, len(order)), dtype=np.int64)
    found_cuts = np.zeros((count, len(cuts)), dtype=np.int64)
    found_starts = np.zeros((count, len(starts)), dtype=np.int64)
    new_order, new_cuts, new_starts = order.copy(), cuts.copy(), starts.copy()
    current_s = load_s(
        a, order, cuts, starts, stages, sizes[size], batch // sizes[size], recompute, power
    )
    for step in range(steps):
        copy_into(new_order, order)
        copy_into(new_cuts, cuts)
        copy_into(new_starts, starts)
        new_stages, new_size = move(new_order, new_cuts, new_starts, stages, most, size, count)
        rows = sizes[new_size]
        seconds = load_s(
            a, new_order, new_cuts, new_starts, new_stages, rows, batch // rows, recompute, power
        )
        warmth = heat * (1 - step / steps) + COLD
        limit_s = current_s * (1 - warmth * np.log(1 - np.random.random()))
        if not seconds < np.inf or seconds > limit_s:
            continue
        copy_into(order, new_order)
        copy_into(cuts, new_cuts)
        copy_into(starts, new_starts)
        stages, size, current_s = new_stages, new_size, seconds
        if seconds < found_s[size]:
            found_s[size], found_stages[size] = seconds, stages
            copy_into(found_order[size], order)
            copy_into(found_cuts[size], cuts)
            copy_into(found_starts[size], starts)
    return found_s, found_stages, found_order, found_cuts, found_starts
