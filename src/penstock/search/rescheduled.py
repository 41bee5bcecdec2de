"""A plan's layers and devices under a schedule that planners do not search over.

Planners choose stages for orders of whole backwards with one stage a device. Other families take
over the sets of devices and the micro-batches of such a plan; where they hold several stages a
device, the layers are cut anew, and the cuts are then moved while the simulator finds that better.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score, score_of
from penstock.plan.schedule_costs import priced
from penstock.schedule.placement import PlacementStyle
from penstock.schedule.registry import FAMILIES
from penstock.search.moves import moved_cuts, other_micro_batches
from penstock.search.recut import recut

__all__ = ["rescheduled"]

ROUNDS = (2, 3, 4)
"""Stages that a set of devices holds, as far as there are layers for them."""

MOST_SCORES = 300
"""Plans that are scored for one start."""


def rescheduled(problem: PlanningProblem, plan: Plan, schedule: str, score: Score) -> Plan | None:
    """The best plan found on the devices of ``plan`` under ``schedule``; None where none fits."""
    best, best_s = None, inf
    for start in starts(problem, plan, schedule):
        found, found_s = climbed(problem, start, schedule, score)
        if found_s < best_s:
            best, best_s = found, found_s
    return best


def starts(problem: PlanningProblem, plan: Plan, schedule: str) -> Iterator[Plan]:
    """Plans to begin at: every placement that the schedule has, without and with recompute."""
    plain = replace(plan, in_flight_limit=())
    for placed in placements(problem, plain, schedule):
        recomputing = (
            replace(placed, stages=tuple(replace(s, recompute=r) for s in placed.stages))
            for r in problem.recompute_choices
        )
        yield from dict.fromkeys([placed, *recomputing])


def placements(problem: PlanningProblem, plan: Plan, schedule: str) -> Iterator[Plan]:
    """The plan's layers on its sets of devices, placed in each way that the schedule allows."""
    family = FAMILIES[schedule]
    rounds = (family.rounds,) if family.rounds else (2,) if family.is_searched else ROUNDS
    own: dict[PlacementStyle, str] = {family.placement: schedule}
    for way, name in (family.stand_ins or own).items():
        named = replace(plan, schedule=name)
        if way in ("straight", "mirrored"):
            yield named
            continue
        for count in rounds:
            if count * len(plan.stages) <= len(problem.profile.layers):
                yield recut(problem, named, way, count)


def climbed(
    problem: PlanningProblem, start: Plan, schedule: str, score: Score
) -> tuple[Plan, float]:
    """Move cuts and the size of micro-batches while that is better; then the schedule itself.

    While cuts move, the schedule is told the costs of the first plan of each size of micro-batches,
    so that plans which differ by a cut share one order; the last plan's order is made for its own.
    """
    told: dict[int, Plan] = {}

    def seconds_of(plan: Plan) -> float:
        first = told.setdefault(plan.micro_batch_size, priced(problem, plan))
        known = replace(plan, costs=first.costs, memory_bytes=first.memory_bytes)
        return score_of(known, score)

    best, best_s = start, seconds_of(start)
    scores, moved = 1, True
    while moved and scores < MOST_SCORES:
        moved = False
        cuts = moved_cuts(best) if best_s < inf else ()
        for other in (*cuts, *other_micro_batches(problem, best)):
            scores += 1
            other_s = seconds_of(other)
            if other_s < best_s:
                best, best_s, moved = other, other_s, True
                break
            if scores >= MOST_SCORES:
                break
    last = priced(problem, replace(best, schedule=schedule))
    return last, score_of(last, score)
