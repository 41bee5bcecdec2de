"""The inner loop of `penstock.planners.pipedream`, compiled.

A test compares it with the enumeration of all partitions of small problems. The loop is written
for numba: flat arrays, no objects.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.plan.run_tables import Floats

__all__ = ["partition"]

Integers = NDArray[np.int64]


def partition(
    value: Floats,
    choice: Integers,
    compute_s: Floats,
    least_s: Floats,
    parameter_bytes: Floats,
    reduce_each: Floats,
    move_s: Floats,
    needed_bytes: Floats,
    memory_bytes: float,
    most_in_flight: int,
    starts: int,
) -> None:
    """Fill ``value[lo, hi, m]`` for ``lo < starts``: least seconds of the slowest stage.

    One stage of layers ``lo..hi-1`` on ``m`` workers takes ``(compute_s[lo, hi] + reduce_each[m] *
    parameter_bytes[lo, hi]) / m``. It must hold ``needed_bytes``: the first table of them, the
    second for each micro-batch in flight after the first, of which a worker has as many as there
    are workers from its stage to the end over those of the stage; both the last stand for rows of
    a whole micro-batch, so the workers of a stage share them. ``move_s[cut]`` are seconds of both
    directions, of which each worker carries its share. An infinite ``reduce_each`` forbids a
    number of workers. ``least_s`` are seconds that one worker needs at least; they must add up.

    A worker may stay idle where that is better or a run has fewer layers than workers. ``choice``
    is -2 for one worker less, -1 for one stage, else the last stage's first layer and workers, as
    ``cut * workers + m``.
    """
    held, first, further = needed_bytes[0], needed_bytes[1], needed_bytes[2]
    layers, workers = value.shape[1] - 1, value.shape[2]
    for lo in range(starts):
        for hi in range(lo + 1, layers + 1):
            output_s = move_s[hi] if hi < layers else 0.0
            for m in range(1, workers):
                # One worker less, unless something is no slower.
                best, best_choice = value[lo, hi, m - 1] * (1 + 1e-12), -2
                ahead = min((workers - 1 + m - 1) // m, most_in_flight) - 1
                needed = (first[lo, hi] + ahead * further[lo, hi]) / m
                if reduce_each[m] < np.inf and held[lo, hi] + needed <= memory_bytes:
                    whole_s = (compute_s[lo, hi] + reduce_each[m] * parameter_bytes[lo, hi]) / m
                    if whole_s < best:
                        best, best_choice = whole_s, -1
                middle = lo + 1
                for last in range(m - 1, 0, -1):
                    before = m - last
                    ahead = (workers - 1 - before + last - 1) // last
                    ahead = min(ahead, most_in_flight) - 1
                    if reduce_each[last] == np.inf or output_s / last >= best:
                        continue
                    # From the cut that balances both sides outwards, while either can be better.
                    above = hi - 1
                    while middle < above:
                        cut = (middle + above) // 2
                        if least_s[lo, cut] * last < least_s[cut, hi] * before:
                            middle = cut + 1
                        else:
                            above = cut
                    for direction in (1, -1):
                        cut = middle if direction == 1 else middle - 1
                        while lo < cut < hi:
                            stage_s = (
                                compute_s[cut, hi] + reduce_each[last] * parameter_bytes[cut, hi]
                            ) / last
                            if direction == -1 and stage_s >= best:
                                break
                            if direction == 1 and least_s[lo, cut] / before >= best:
                                break
                            seconds = max(
                                value[lo, cut, before], stage_s, move_s[cut] / last, output_s / last
                            )
                            needed = (first[cut, hi] + ahead * further[cut, hi]) / last
                            if seconds < best and held[cut, hi] + needed <= memory_bytes:
                                best, best_choice = seconds, cut * workers + last
                            cut += direction
                value[lo, hi, m] = value[lo, hi, m - 1] if best_choice == -2 else best
                choice[lo, hi, m] = best_choice
