"""The least time of any relaxed plan: cuts, replicas, micro-batch size, and the best of links."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf, log, sqrt

from penstock.bounds.relaxation import MANY_DEVICES, Relaxation, RelaxedPlan, SizedRelaxation

__all__ = ["PRECISION", "least_relaxed"]

PRECISION = 3e-4
"""The bound is this close (as a part of itself) to the least time of any relaxed plan."""

ROUGHLY = 0.03
"""The same while micro-batch sizes are only compared."""

MANY_PRECISION = 1e-2
"""The same on more than `MANY_DEVICES`."""

FIRST_STEP, LONGEST_STEP = 1.02, 1.1
"""The first guess above a known bound; each further one goes twice as far, up to a limit: what no
plan reaches is soon answered, what many plans reach is not."""

THREADS = 2
"""Micro-batch sizes that are asked side by side."""

MOST_BYTES = 250e6
"""Sizes with larger tables are asked one after the other."""

LEAST_S = 1e-9
"""Where nothing is known to take time, the search for the bound starts here."""

WORTH_FINER = 0.01
"""Where finer fronts show that no plan comes so close to the bound found, they are used."""

MOST_S = 1e15
"""What takes longer than this never ends: no stage fits in any memory."""


def least_relaxed(
    relaxed: Relaxation, floors_s: Mapping[int, float]
) -> tuple[float, RelaxedPlan | None]:
    """Seconds that no plan beats, and a relaxed plan that takes hardly more.

    ``floors_s`` are bounds known already for each micro-batch size. Where finer fronts know of no
    plan that is hardly slower, all is asked once more with them. Infinite seconds and no plan where
    nothing fits in memory.
    """
    front, *finer = relaxed.fronts
    lower_s, best = narrowed(relaxed, floors_s, front)
    for front in finer:
        if best is None or best.seconds <= LEAST_S * FIRST_STEP:
            break
        limit_s = best.seconds * (1 + WORTH_FINER)
        if relaxed.of_size(best.micro_batch_size).reached(limit_s, front) is None:
            lower_s[best.micro_batch_size] = limit_s
            lower_s, best = narrowed(relaxed, lower_s, front)
    return min(lower_s.values()), best


def narrowed(
    relaxed: Relaxation, floors_s: Mapping[int, float], front: int
) -> tuple[dict[int, float], RelaxedPlan | None]:
    """Bounds of all micro-batch sizes, and a relaxed plan that takes hardly more than the least.

    The size with about as many micro-batches as samples in each is narrowed down roughly (the next
    one where it has no plan); all others are asked for a plan that is clearly faster, and narrowed
    down one after the other where they have one; then the sizes that may still have a faster plan
    are narrowed down to `PRECISION`.
    """
    lower_s: dict[int, float] = dict(floors_s)
    best: RelaxedPlan | None = None
    batch = relaxed.problem.global_batch
    many = len(relaxed.problem.cluster.devices) > MANY_DEVICES
    precision, roughly = (MANY_PRECISION, MANY_PRECISION) if many else (PRECISION, ROUGHLY)
    order = sorted(floors_s, key=lambda rows: (abs(log(rows * rows / batch)), rows))
    while best is None and order:
        rows = order.pop(0)
        size = relaxed.of_size(rows)
        lower_s[rows], best = first_plan(size, lower_s[rows], front)
        if best:
            lower_s[rows], best = bisected(size, lower_s[rows], best, ROUGHLY, front)
    if best is None:
        return lower_s, None
    best = faster_sizes(relaxed, order, lower_s, best, roughly, front)
    sizes = sorted(floors_s, key=lambda rows: (lower_s[rows], rows))
    return lower_s, faster_sizes(relaxed, sizes, lower_s, best, precision, front)


def faster_sizes(
    relaxed: Relaxation,
    sizes: Sequence[int],
    lower_s: dict[int, float],
    best: RelaxedPlan,
    precision: float,
    front: int,
) -> RelaxedPlan:
    """The best plan once no size has one that is faster by more than ``precision``.

    Raises the bounds ``lower_s`` of the sizes. Questions are asked side by side.
    """

    def faster(rows: int) -> RelaxedPlan | None:
        return relaxed.of_size(rows).reached(most_s, front)

    if best.seconds <= LEAST_S * FIRST_STEP:
        return best
    most_s = best.seconds * (1 - precision)
    open_sizes = [rows for rows in sizes if lower_s[rows] < most_s]
    most_bytes = max((relaxed.of_size(rows).table_bytes(most_s) for rows in open_sizes), default=0)
    with ThreadPoolExecutor(THREADS if most_bytes <= MOST_BYTES else 1) as threads:
        answers = list(threads.map(faster, open_sizes))
    for rows, plan in zip(open_sizes, answers, strict=True):
        if plan is None:
            lower_s[rows] = most_s
    for plan in filter(None, answers):
        found = within(relaxed, plan, best.seconds * (1 - precision), lower_s, front)
        if found:
            # Most likely this size is about as good as the best so far.
            found = within(relaxed, found, lower_s[best.micro_batch_size], lower_s, front) or found
            rows = found.micro_batch_size
            size = relaxed.of_size(rows)
            lower_s[rows], best = bisected(size, lower_s[rows], found, precision, front)
    return best


def within(
    relaxed: Relaxation, known: RelaxedPlan, limit_s: float, lower_s: dict[int, float], front: int
) -> RelaxedPlan | None:
    """A plan of the same size within a time, ``known`` where it is; else its bound is raised."""
    rows = known.micro_batch_size
    if known.seconds <= limit_s:
        return known
    if lower_s[rows] >= limit_s:
        return None
    found = relaxed.of_size(rows).reached(limit_s, front)
    if found is None:
        lower_s[rows] = limit_s
    return found


def first_plan(
    sized: SizedRelaxation, floor_s: float, front: int
) -> tuple[float, RelaxedPlan | None]:
    """Seconds that no plan of a size beats, and some plan: time is raised until there is one."""
    least_s, step = max(floor_s, LEAST_S), FIRST_STEP
    while least_s < MOST_S:
        found = sized.reached(least_s * step, front)
        if found:
            return (least_s if least_s > LEAST_S else floor_s), found
        least_s, step = least_s * step, min(step * step, LONGEST_STEP)
    return inf, None


def bisected(
    sized: SizedRelaxation, least_s: float, best: RelaxedPlan, precision: float, front: int
) -> tuple[float, RelaxedPlan]:
    """Seconds that no plan of a size beats, and the best one, as close as ``precision`` says."""
    floor_s, least_s = least_s, max(least_s, LEAST_S)
    while least_s < best.seconds * (1 - precision) and best.seconds > LEAST_S * FIRST_STEP:
        middle_s = sqrt(least_s * best.seconds)
        found = sized.reached(middle_s, front)
        best, least_s = found or best, least_s if found else middle_s
    return (least_s if least_s > LEAST_S else floor_s), best
