"""The inner loop of `penstock.planners.pipedream`, compiled.

A test compares it with the enumeration of all partitions of small problems. The loop is written
for numba: flat arrays, no objects.
"""

from typing import NamedTuple

import numpy as np

from penstock.plan.run_tables import Floats, Integers

__all__ = ["LevelCosts", "partition"]


class LevelCosts(NamedTuple):
    """What the stages of one level cost.

    ``unit_s[k, lo, hi]``: seconds of a micro-batch on one worker, infinite where it does not fit;
    ``unit[before, m]`` is the ``k`` for a stage on the ``m`` workers behind the first ``before``.
    ``least_s``: seconds that one worker needs at least, which must add up. ``reduce_each[m]``:
    seconds of ``m`` workers for each of ``parameter_bytes``, infinite for too many workers.
    ``move_s[cut]``: seconds of both directions, of which each worker carries its share.
    """

    unit_s: Floats
    unit: Integers
    least_s: Floats
    parameter_bytes: Floats
    reduce_each: Floats
    move_s: Floats


def partition(value: Floats, choice: Integers, costs: LevelCosts) -> None:
    """Fill ``value[lo, hi, m]``: least seconds of the slowest stage on the first ``m`` workers.

    One stage of layers ``lo..hi-1`` on ``m`` workers takes ``(unit_s + reduce_each[m] *
    parameter_bytes[lo, hi]) / m``. A worker may stay idle where that is better or a run has fewer
    layers than workers. ``choice`` is -1 for one worker less, else the last stage's first layer and
    workers, as ``cut * workers + m``.
    """
    unit_s, unit, least_s = costs.unit_s, costs.unit, costs.least_s
    parameter_bytes, reduce_each, move_s = costs.parameter_bytes, costs.reduce_each, costs.move_s
    layers, workers = value.shape[1] - 1, value.shape[2]
    for lo in range(min(value.shape[0], layers)):
        for hi in range(lo + 1, layers + 1):
            output_s = move_s[hi] if hi < layers else 0.0
            for m in range(1, workers):
                # One worker less, unless something is no slower.
                less_s = value[lo, hi, m - 1]
                best, best_choice = less_s * (1 + 1e-12), -1
                middle = lo + 1
                for last in range(m, 0, -1):
                    before = m - last
                    if reduce_each[last] == np.inf:
                        continue
                    own_s = unit_s[unit[before, last]]
                    whole_s = (own_s[lo, hi] + reduce_each[last] * parameter_bytes[lo, hi]) / last
                    # The first workers are idle only where it pays.
                    pays = before == 0 or whole_s * (1 + 1e-12) < less_s
                    if pays and whole_s < best:
                        best, best_choice = whole_s, lo * workers + last
                    if before == 0 or output_s / last >= best:
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
                                own_s[cut, hi] + reduce_each[last] * parameter_bytes[cut, hi]
                            ) / last
                            if direction == -1 and stage_s >= best:
                                break
                            if direction == 1 and least_s[lo, cut] / before >= best:
                                break
                            seconds = max(
                                value[lo, cut, before], stage_s, move_s[cut] / last, output_s / last
                            )
                            if seconds < best:
                                best, best_choice = seconds, cut * workers + last
                            cut += direction
                value[lo, hi, m] = value[lo, hi, m - 1] if best_choice < 0 else best
                choice[lo, hi, m] = best_choice
