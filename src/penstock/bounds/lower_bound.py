"""Times that no plan can beat."""

from dataclasses import dataclass
from itertools import chain
from math import inf

from penstock.bounds.least_cost import floor_of, host_speeds, least_per_sample
from penstock.bounds.link_bound import Core, link_bound
from penstock.bounds.plan_bound import plan_bound_s
from penstock.plan.problem import PlanningProblem
from penstock.plan.problem_memo import remembered
from penstock.schedule.registry import FAMILIES
from penstock.words import size_text

__all__ = ["LowerBound", "gap", "lower_bound", "lower_bound_s", "plan_bound_s"]

WHOLE_BACKWARDS = "whole backwards, one stage a device"
ANY_ORDER = "whole or split backwards, any stages a device, either direction"
"""The plans and orders that a bound is about."""

MEMORY_ROUNDING = 1e-9
"""Memory that is short by a smaller share counts as enough."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds that no plan beats, and in words what they are spent on.

    ``covers`` says for which plans and orders the bound holds; empty: for all there are.
    """

    seconds: float
    argument: str
    covers: str = ""


@remembered
def lower_bound(problem: PlanningProblem) -> LowerBound:
    """The bound on every plan of ``problem``: any stages, devices, slices, recompute and order.

    The answer is the least over the micro-batch sizes. For each it is the largest of the bounds of
    `bound_of_size`, and of `penstock.bounds.link_bound` if all schedules allowed flush. It is
    infinite where the parameters of some layer fit on no device.

    The orders depend on the schedules that the problem allows; ``covers`` of the answer names them.
    If all have whole backwards and one stage a device, the bound holds for the orders of such plans
    only. Otherwise it holds for every order of whole or split backwards, any stages a device, one
    or both directions.
    """
    flushes = all(FAMILIES[name].flushes for name in problem.schedules)
    covers = (WHOLE_BACKWARDS if has_whole_backwards(problem) else ANY_ORDER) if flushes else ""
    copies = 2 + problem.optimizer_bytes_per_parameter_byte
    fattest = max(problem.profile.layers, key=lambda layer: layer.parameter_bytes)
    largest = max(device.memory_bytes for device in problem.cluster.devices)
    if copies * fattest.parameter_bytes > largest * (1 + MEMORY_ROUNDING):
        return LowerBound(inf, f"memory: layer '{fattest.name}' fits no device", covers)
    found: list[LowerBound] = []
    for size in problem.micro_batch_sizes:
        bound = bound_of_size(problem, size)
        seconds, core = link_bound(problem, size, bound.seconds) if flushes else (0.0, None)
        if core:
            bound = LowerBound(seconds, core_words(problem, core))
        found.append(bound)
    least = min(found, key=lambda bound: bound.seconds)
    return LowerBound(least.seconds, least.argument, covers)


def core_words(problem: PlanningProblem, core: Core) -> str:
    """What the bound of links rests on, for readers."""
    layers, hosts = problem.profile.layers, len(problem.cluster.hosts)
    first, last = (layers[core.layers[end]].name for end in (0, -1))
    return (
        f"{len(core.layers)} layers from '{first}' to '{last}' on one host, or their gradients or "
        f"{size_text(core.row_bytes)} a sample between {hosts} hosts"
    )


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
    all_speeds = sorted(chain.from_iterable(map(host_speeds, problem.cluster.hosts)), reverse=True)
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


def has_whole_backwards(problem: PlanningProblem) -> bool:
    """Whether all schedules allowed have whole backwards and one stage a device."""
    return all(FAMILIES[name].is_planned for name in problem.schedules)


def may_be_mirrored(problem: PlanningProblem) -> bool:
    """Whether a schedule allowed holds every stage twice."""
    return any(FAMILIES[name].placement == "mirrored" for name in problem.schedules)


def gap(iteration_s: float, bound_s: float) -> float:
    """By which share a plan is slower than a bound: 0.25 for a quarter more.

    >>> gap(1.25, 1.0)
    0.25
    """
    return iteration_s / bound_s - 1 if bound_s > 0 else inf
