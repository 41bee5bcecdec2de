"""The fastest plan over the schedule families: skeletons, then climbs that the simulator judges.

The best cuts, replicas and micro-batches depend on the family, so each family gets plans of its
own. They are even plans on equal groups of devices, and plans with the family's placement on the
groups of the best plans with whole backwards. The simulator judges them in the order of their
estimate. Plans whose load shows that they cannot win are left out. Moves then improve the best
plans of different placements: cuts, micro-batches, recompute, devices between groups. An order that
is searched for takes long to make. So such schedules are tried only on the best plans, and on those
with the least load.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from math import inf

from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.schedule_costs import priced
from penstock.schedule.registry import FAMILIES
from penstock.search.judge import NEAR, Judge, SearchStep, actions_of, judge_of
from penstock.search.neighbours import climb
from penstock.search.skeletons import Skeleton, load_s, skeletons_of_plans

__all__ = ["adapted_to", "family_steps", "plain_families", "rescheduled", "under_schedule"]

EQUIVALENT = frozenset({"1f1b-as", "1f1b-sno", "1f1b-so"})
"""Families that are not tried where faster or leaner ones are allowed."""

ACTIONS_FOR_SKELETONS = 600_000
"""Actions whose orders are made and simulated for skeletons; about half a second."""

ACTIONS_FOR_MOVES = 600_000
"""The same for the moves from each start."""

FIRST_STARTS, ACTIONS_FOR_FIRST_MOVES, FAR = 12, 60_000, 1.5
"""How many plans of different placements are improved by few moves, with so many actions each; and
how many times as long as the best plan they may take before."""

STARTS = 3
"""How many of them are then improved by more."""

ADAPTED = 6
"""How many of the fastest plans, and of those with the least load, get an order that is searched
for."""


def family_steps(judge: Judge, starts: Iterable[Skeleton]) -> Iterator[SearchStep]:
    """Ever better plans under the schedules that planners do not know, from ``starts``."""
    yield judge.step("schedule families")
    leaders = yield from simulated_skeletons(judge, starts)
    # Where stages recompute, memory is short, and a search for orders takes long and finds little.
    keeping = [one for one in leaders if not any(s.recompute for s in one[1].stages)]
    promising = [*keeping[:ADAPTED], *sorted(keeping, key=load_of)[:ADAPTED]]
    for name in judge.allowed:
        if FAMILIES[name].is_searched:
            for plan in dict.fromkeys(plan for _, plan in promising):
                yield judge.step(f"schedule {name}")
                adapted = adapted_to(judge.problem, plan, name)
                if load_s(adapted) < judge.best_s:
                    leaders.append((judge.simulate(adapted), adapted))
    leaders.sort(key=lambda one: one[0])
    for most, actions in ((FIRST_STARTS, ACTIONS_FOR_FIRST_MOVES), (STARTS, ACTIONS_FOR_MOVES)):
        near = dict[object, tuple[float, Plan]]()
        for seconds, plan in leaders:
            if seconds < FAR * judge.best_s:
                near.setdefault(
                    (plan.device_groups, plan.placement, plan.mirrored), (seconds, plan)
                )
        leaders = list[tuple[float, Plan]]()
        for seconds, plan in [*near.values()][:most]:
            yield judge.step(f"moves under {plan.schedule}")
            end, end_s = climb(judge, plan, seconds, actions)
            leaders.append((end_s, end))
        leaders.sort(key=lambda one: one[0])
    yield judge.step("schedule families")


def simulated_skeletons(
    judge: Judge, starts: Iterable[Skeleton]
) -> Generator[SearchStep, None, list[tuple[float, Plan]]]:
    """Simulate skeletons in the order of their estimate; the best of each placement, in order."""
    leaders: dict[object, tuple[float, Plan]] = {}
    actions = ACTIONS_FOR_SKELETONS
    for skeleton in sorted(starts, key=lambda one: one.estimate_s):
        if skeleton.load_s >= NEAR * judge.best_s:
            continue
        if actions <= 0:
            break
        for name in skeleton.schedules:
            plan = under_schedule(skeleton.plan, name)
            seconds = judge.simulate(plan)
            # A plan that is refused, or does not fit, is not judge.
            actions -= actions_of(plan) if seconds < inf else actions_of(plan) // 10
            key = (plan.device_groups, plan.placement, plan.mirrored)
            if seconds < leaders.get(key, (inf,))[0]:
                leaders[key] = seconds, plan
        yield judge.step("schedule families")
    return sorted(leaders.values(), key=lambda one: one[0])


def plain_families(schedules: Iterable[str]) -> tuple[str, ...]:
    """The schedules whose orders are not searched for, or substitutes where all are."""
    plain = [name for name in schedules if not FAMILIES[name].is_searched]
    worth = [name for name in plain if name not in EQUIVALENT]
    stand_ins = [one for name in schedules for one in FAMILIES[name].stand_ins.values()]
    return tuple(dict.fromkeys(worth or plain or stand_ins))


def load_of(leader: tuple[float, Plan]) -> float:
    """The load of a plan that was simulated; infinite where the plan has no costs."""
    return load_s(leader[1]) if leader[1].costs else inf


def under_schedule(plan: Plan, schedule: str) -> Plan:
    """The plan under a schedule, without costs where its order does not depend on them."""
    if FAMILIES[schedule].is_planned:
        return replace(plan, schedule=schedule, costs=(), memory_bytes=())
    return replace(plan, schedule=schedule)


def adapted_to(problem: PlanningProblem, plan: Plan, schedule: str) -> Plan:
    """The plan under a schedule that makes its order for the costs of the stages."""
    return priced(problem, replace(plan, schedule=schedule, in_flight_limit=()))


def rescheduled(problem: PlanningProblem, plan: Plan, schedule: str, score: Score) -> Plan | None:
    """The best plan found under ``schedule`` on the device sets of ``plan``; None if none fits."""
    groups = frozenset(plan.device_groups)

    def on_its_devices(other: Plan) -> float:
        return score(other) if groups.issuperset(other.device_groups) else inf

    judge = judge_of(problem.under((schedule,)), on_its_devices)
    starts = skeletons_of_plans(problem, plain_families([schedule]), [plan])
    *_, last = family_steps(judge, starts)
    return replace(last.plan, planner=plan.planner) if last.plan else None
