"""The recurrence of `penstock.planners.dynamic_program` as one would write it on paper."""

from dataclasses import replace
from functools import cache
from math import inf

from penstock.costs.stage_costs import (
    depth_function,
    device_memory_bytes,
    rows_by_speed,
    stage_seconds,
    transfer,
)
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem


def plain_best_s(
    problem: PlanningProblem, order: tuple[int, ...], micro_batch_size: int, schedule: str
) -> dict[tuple[int, int], float]:
    """Least seconds by (number of stages, first device in use), where any plan fits.

    Slow: every look-up sums over layers. For the recurrence see
    `penstock.planners.spp.partition.partition`.
    """
    layers = len(problem.profile.layers)
    micro_batches = problem.global_batch // micro_batch_size
    depth = depth_function(schedule)

    def stage_of(run: range, position: int, replicas: int) -> Stage:
        devices = order[position : position + replicas]
        return Stage(run, devices, rows_by_speed(problem.cluster, devices, micro_batch_size))

    def fits(stage: Stage, in_flight: int, *, recompute: bool) -> bool:
        return all(
            device_memory_bytes(problem, replace(stage, recompute=recompute), rows, in_flight)
            <= problem.cluster.devices[device].memory_bytes
            for device, rows in zip(stage.devices, stage.slices, strict=True)
        )

    def busy_s(stage: Stage, in_flight: int) -> float:
        """Seconds of one micro-batch; infinite where it does not fit."""
        seconds = stage_seconds(problem, stage)
        if problem.recompute != "on" and fits(stage, in_flight, recompute=False):
            return seconds.whole_s
        if problem.recompute != "off" and fits(stage, in_flight, recompute=True):
            return seconds.whole_s + (seconds.forward_s if in_flight > 1 else 0.0)
        return inf

    def after_s(stage: Stage) -> float:
        """Seconds after the last backward of a stage."""
        return stage_seconds(problem, stage).after_s

    @cache
    def best(k: int, lo: int, position: int, replicas: int) -> float:
        """Least seconds of layers ``lo`` to the end in ``k`` stages, the first on a window."""
        if replicas > micro_batch_size or position + replicas > len(order):
            return inf
        in_flight = depth(k, micro_batches)
        if k == 1:
            last = stage_of(range(lo, layers), position, replicas)
            return micro_batches * busy_s(last, in_flight) + after_s(last)
        return min(
            (
                joined(stage_of(range(lo, hi), position, replicas), k, next_replicas)
                for hi in range(lo + 1, layers)
                for next_replicas in range(1, len(order) - position - replicas + 1)
                if next_replicas <= micro_batch_size
            ),
            default=inf,
        )

    def joined(stage: Stage, k: int, next_replicas: int) -> float:
        """Seconds with ``stage`` before the best of ``k - 1`` stages on the next devices."""
        behind = order.index(stage.devices[-1]) + 1
        busy = busy_s(stage, depth(k, micro_batches))
        moved = transfer(
            problem, stage, stage_of(range(stage.layers.stop, layers), behind, next_replicas)
        )
        return max(
            micro_batches * busy + after_s(stage),
            micro_batches * max(moved),
            busy + sum(moved) + best(k - 1, stage.layers.stop, behind, next_replicas),
        )

    most_stages = min(len(order), layers, problem.max_stages or layers)
    found = {
        (k, position): min(best(k, 0, position, r) for r in range(1, len(order) - position + 1))
        for k in range(1, most_stages + 1)
        for position in range(len(order))
    }
    return {key: seconds for key, seconds in found.items() if seconds < inf}
