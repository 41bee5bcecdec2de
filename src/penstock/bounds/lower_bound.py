"""Times that no plan can beat."""

from dataclasses import dataclass
from math import inf

from penstock.bounds.plan_bound import plan_bound_s
from penstock.bounds.resource_bound import PRECISION, resource_bound
from penstock.bounds.shortened_chain import floor_of
from penstock.bounds.visits import full_speeds, has_whole_backwards, may_be_mirrored
from penstock.plan.problem import PlanningProblem
from penstock.plan.problem_memo import remembered
from penstock.profile.model_profile import Affine
from penstock.schedule.registry import FAMILIES

__all__ = ["LowerBound", "gap", "lower_bound", "lower_bound_s", "plan_bound_s"]

WHOLE_BACKWARDS = "whole backwards, one stage a device"
ANY_ORDER = "whole or split backwards, any stages a device, either direction"
"""The plans and orders that a bound is about."""

NOT_IN_MEMORY = "memory: in every cut of the model some layers fit no device"


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds that no plan beats, and in words what they are spent on.

    ``covers`` says for which plans and orders the bound holds. ``micro_batch_size`` is the one with
    the least bound; of several, the first found.
    """

    seconds: float
    argument: str
    covers: str = ""
    micro_batch_size: int = 0


@remembered
def lower_bound(problem: PlanningProblem) -> LowerBound:
    """The bound on every plan of ``problem``: any stages, devices, slices, recompute and order.

    The orders depend on the schedules that the problem allows; ``covers`` of the answer names them.

    - All schedules flush: `penstock.bounds.resource_bound`. If all have whole backwards and one
      stage a device, the bound holds for the orders of such plans only. Otherwise it holds for
      every order of whole or split backwards, any stages a device, one or both directions.
    - Some schedule does not flush: the bounds of `bound_of_size` alone, which hold for any order.

    The answer is the least over the micro-batch sizes, and never less than `bound_of_size`. It is
    infinite where no plan can fit in memory. Models and clusters that are too large for
    `penstock.bounds.resource_bound` have only `bound_of_size`.
    """
    simple = {size: bound_of_size(problem, size) for size in problem.micro_batch_sizes}
    if not all(FAMILIES[name].flushes for name in problem.schedules):
        return min(simple.values(), key=lambda bound: bound.seconds)
    covers = WHOLE_BACKWARDS if has_whole_backwards(problem) else ANY_ORDER
    answer = resource_bound(problem, {size: bound.seconds for size, bound in simple.items()})
    if answer.seconds == inf:
        return LowerBound(inf, NOT_IN_MEMORY, covers)
    floor = simple[answer.micro_batch_size]
    if answer.seconds <= floor.seconds * (1 + PRECISION):
        return LowerBound(answer.seconds, floor.argument, covers, answer.micro_batch_size)
    through = f"micro-batches of {answer.micro_batch_size} through all layers: {answer.argument}"
    return LowerBound(answer.seconds, through, covers, answer.micro_batch_size)


def lower_bound_s(problem: PlanningProblem) -> float:
    """The seconds of `lower_bound`."""
    return lower_bound(problem).seconds


def bound_of_size(problem: PlanningProblem, micro_batch_size: int) -> LowerBound:
    """The largest of three bounds for one micro-batch size, whatever the schedule.

    - *work*: every layer computes all samples of the batch, at most ``b`` at a time. So it takes
      at least ``batch * min(c(1), c(b) / b)`` seconds of a device of speed 1, where ``c`` is its
      forward plus backward cost. (It is affine, so the seconds per sample are extreme at the ends.)
      All devices share that work, at their full speeds.
    - *one layer*: the same for the work of one layer alone, on the ``b`` fastest devices, because a
      micro-batch of ``b`` samples has at most ``b`` slices. A mirrored pipeline holds every layer
      twice, so there it is ``2 b`` devices.
    - *one micro-batch* (whole backwards only): let each layer cost at least ``f + q * rows`` with
      f, q >= 0. A row on replica ``d``, which has ``n_d`` rows, waits for ``(f + q * n_d) / v_d``,
      and ``sum of n_d^2 / v_d >= b^2 / sum of v_d``. So the mean row passes all layers, forward and
      back, in at least ``sum of f / fastest speed + q * b / sum of speeds``.

    On hosts whose devices share cores only as many devices count as run at full speed.
    """
    costs = [layer.forward_s + layer.backward_s for layer in problem.profile.layers]
    all_speeds = full_speeds(problem.cluster)
    holders = (1 + may_be_mirrored(problem)) * micro_batch_size
    speeds = all_speeds[:holders]
    work_s = [problem.global_batch * least_per_sample(cost, micro_batch_size) for cost in costs]
    most = max(range(len(work_s)), key=work_s.__getitem__)
    bounds = [
        LowerBound(sum(work_s) / sum(all_speeds), f"all work over all {len(all_speeds)} devices"),
        LowerBound(
            work_s[most] / sum(speeds),
            f"layer {most} '{problem.profile.layers[most].name}' alone, on {len(speeds)} devices",
        ),
    ]
    if has_whole_backwards(problem):
        floors = [floor_of(cost, micro_batch_size) for cost in costs]
        fixed_s = sum(floor.fixed for floor in floors) / speeds[0]
        by_rows_s = sum(floor.per_sample for floor in floors) * micro_batch_size / sum(speeds)
        through = f"one micro-batch of {micro_batch_size} samples through all layers and back"
        bounds.append(LowerBound(fixed_s + by_rows_s, through))
    return max(bounds, key=lambda bound: bound.seconds)


def least_per_sample(cost: Affine, most_samples: int) -> float:
    """The fewest seconds a sample can take in slices of 1 to ``most_samples``."""
    return max(0.0, min(cost.at(1), cost.at(most_samples) / most_samples))


def gap(iteration_s: float, bound_s: float) -> float:
    """By which share a plan is slower than a bound: 0.25 for a quarter more.

    >>> gap(1.25, 1.0)
    0.25
    """
    return iteration_s / bound_s - 1 if bound_s > 0 else inf
