"""Cuts the layers of a plan anew, in runs of about equal time, on the same sets of devices."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.schedule.placement import PlacementStyle, placement_of_style

__all__ = ["recut"]


def recut(problem: PlanningProblem, plan: Plan, style: PlacementStyle, rounds: int) -> Plan:
    """The same sets of devices, each with ``rounds`` stages of about equal time."""
    groups = plan.device_groups
    placement = placement_of_style(style, len(groups), rounds)
    slices = {stage.devices: stage.slices for stage in plan.stages}
    speeds = [
        plan.micro_batch_size
        * min(
            problem.cluster.devices[device].speed / rows
            for device, rows in zip(devices, slices[devices], strict=True)
        )
        for devices in groups
    ]
    seconds = [
        layer.forward_s.at(plan.micro_batch_size) + layer.backward_s.at(plan.micro_batch_size)
        for layer in problem.profile.layers
    ]
    cuts = even_cuts(seconds, [speeds[group] for group in placement])
    stages = tuple(
        Stage(range(lo, hi), groups[group], slices[groups[group]])
        for (lo, hi), group in zip(pairwise(cuts), placement, strict=True)
    )
    return replace(plan, stages=stages, in_flight_limit=(), costs=(), memory_bytes=())


def even_cuts(seconds: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Cuts between runs of layers whose shares of the work are nearest to the shares of the speeds.

    >>> even_cuts([1, 1, 1, 1, 1, 1], speeds=[1, 2])
    [0, 2, 6]
    """
    sums = list(accumulate(seconds, initial=0.0))
    shares = list(accumulate(speeds))
    cuts = [0]
    for index, share in enumerate(shares[:-1], start=1):
        wanted = sums[-1] * share / shares[-1]
        above = bisect_right(sums, wanted)
        cut = min((above - 1, above), key=lambda i: abs(sums[min(i, len(sums) - 1)] - wanted))
        cuts.append(min(max(cut, cuts[-1] + 1), len(seconds) - (len(speeds) - index)))
    return [*cuts, len(seconds)]
