"""The fastest plan over all schedule families: skeletons, then moves that the simulator judges.

The family decides which cuts, replicas and micro-batches are best, so each gets plans of its own:
even ones on equal groups of devices, and its own placement on the groups of the best plans with
whole backwards. The simulator judges them in the order of their estimate, and leaves out those
whose load shows that they cannot win. The best of different placements are then moved: cuts,
micro-batches, recompute, devices between groups. Orders that are searched for take long to make,
so they are tried on the best plans only, and on those with the least load.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from penstock.plan.cost import rows_by_speed
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score, score_of
from penstock.plan.schedule_costs import priced, with_costs
from penstock.schedule.registry import FAMILIES
from penstock.search.moves import moved_cuts, other_micro_batches
from penstock.search.skeletons import Skeleton, load_s
from penstock.search.step import SearchStep

__all__ = ["FamilySearch", "family_steps", "named", "plain_families"]

EQUIVALENT = frozenset({"1f1b-as", "1f1b-sno", "1f1b-so"})
"""Families that are not tried by themselves where quicker or leaner ones are."""

ACTIONS_FOR_SKELETONS = 700_000
"""Actions whose orders are made and played for skeletons; about a second."""

ACTIONS_FOR_MOVES = 700_000
"""The same for the moves from each start."""

STARTS = 3
"""Plans of different placements from which moves are tried."""

ADAPTED = 3
"""So many of the fastest plans, and of those with the least load, get an order that is searched."""


@dataclass
class FamilySearch:
    """What has been judged so far."""

    problem: PlanningProblem
    score: Score
    judged: dict[Plan, float] = field(default_factory=dict[Plan, float])
    plan: Plan | None = None
    seconds: float = inf

    def judge(self, plan: Plan) -> float:
        """Seconds of a plan, infinite where its schedule refuses it."""
        if plan in self.judged:
            return self.judged[plan]
        seconds = self.judged[plan] = score_of(plan, self.score)
        if seconds < self.seconds and plan.schedule in self.problem.schedules:
            self.plan, self.seconds = plan, seconds
        return seconds

    def step(self, doing: str) -> SearchStep:
        """What is known now."""
        return SearchStep(doing, self.plan and replace(self.plan, planner="search"), self.seconds)


def family_steps(search: FamilySearch, starts: Iterable[Skeleton]) -> Iterator[SearchStep]:
    """Ever better plans, from ``starts``; the last step has the best of ``search``, if any fits."""
    problem = search.problem
    yield search.step("schedule families")
    leaders = yield from judged_skeletons(search, starts)
    # Where stages recompute, memory is short, and searching takes long and finds little.
    keeping = [one for one in leaders if not any(s.recompute for s in one[1].stages)]
    promising = [*keeping[:ADAPTED], *sorted(keeping, key=load_of)[:ADAPTED]]
    for name in problem.schedules:
        if FAMILIES[name].is_searched:
            for _, plan in dict.fromkeys(promising):
                yield search.step(f"schedule {name}")
                adapted = with_costs(problem, replace(plan, schedule=name, in_flight_limit=()))
                if load_s(adapted) < search.seconds:
                    leaders.append((search.judge(adapted), adapted))
    leaders.sort(key=lambda one: one[0])
    for seconds, plan in leaders[:STARTS]:
        yield search.step(f"moves under {plan.schedule}")
        climb(search, plan, seconds)
    yield search.step("schedule families")


def judged_skeletons(
    search: FamilySearch, starts: Iterable[Skeleton]
) -> Generator[SearchStep, None, list[tuple[float, Plan]]]:
    """Simulate skeletons in the order of their estimate; the best of each placement, in order."""
    ranked = sorted(starts, key=lambda one: one.estimate_s)
    leaders: dict[object, tuple[float, Plan]] = {}
    actions = ACTIONS_FOR_SKELETONS
    for skeleton in ranked:
        if skeleton.load_s >= search.seconds:
            continue
        if actions <= 0:
            break
        for name in skeleton.schedules:
            plan = named(skeleton.plan, name)
            seconds = search.judge(plan)
            # What is refused, or does not fit, is not played.
            actions -= actions_of(plan) if seconds < inf else actions_of(plan) // 10
            key = (plan.device_groups, plan.placement, plan.mirrored)
            if seconds < leaders.get(key, (inf,))[0]:
                leaders[key] = seconds, plan
        yield search.step("schedule families")
    return sorted(leaders.values(), key=lambda one: one[0])


def plain_families(problem: PlanningProblem) -> tuple[str, ...]:
    """The schedules whose orders are made at once, or what stands in where all are searched."""
    plain = [name for name in problem.schedules if not FAMILIES[name].is_searched]
    worth = [name for name in plain if name not in EQUIVALENT]
    stand_ins = [one for name in problem.schedules for one in FAMILIES[name].stand_ins.values()]
    return tuple(dict.fromkeys(worth or plain or stand_ins))


def load_of(leader: tuple[float, Plan]) -> float:
    """The load of a plan that was judged; infinite where it was told no costs."""
    return load_s(leader[1]) if leader[1].costs else inf


def named(plan: Plan, schedule: str) -> Plan:
    """The plan under a schedule; planners' own schedules are told no costs."""
    if FAMILIES[schedule].is_planned:
        return replace(plan, schedule=schedule, costs=(), memory_bytes=())
    return replace(plan, schedule=schedule)


def actions_of(plan: Plan) -> int:
    """Forwards and halves of backwards: those that are ordered, and those of each replica."""
    return plan.micro_batches * (3 * len(plan.stages) + len(plan.devices))


def climb(search: FamilySearch, plan: Plan, seconds: float) -> None:
    """Judge plans one move away, and move on to each that is faster, within the budget.

    Cuts are moved under the order that was made for the plan before, which saves making most
    orders; one for the last plan's own costs is tried at the end.
    """
    actions = ACTIONS_FOR_MOVES
    improved = True
    while improved and actions > 0:
        improved = False
        for other in moves(search.problem, plan):
            if other in search.judged or (other.costs and load_s(other) >= seconds):
                continue
            actions -= actions_of(other)
            other_s = search.judge(other)
            if other_s < seconds:
                plan, seconds, improved = other, other_s, True
                break
            if actions <= 0:
                break
    search.judge(priced(search.problem, plan))


def moves(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Plans one move away that keep the placement of stages; few where orders take long to make."""
    yield from moved_cuts(plan)
    if FAMILIES[plan.schedule].is_searched:
        return
    others = [*shifted_devices(problem, plan), *other_micro_batches(problem, plan)]
    if problem.recompute == "auto":
        others += toggled_groups(plan)
    for other in others:
        yield priced(problem, other)


def toggled_groups(plan: Plan) -> Iterator[Plan]:
    """Recompute switched on all stages of one group of devices."""
    for devices in plan.device_groups:
        yield replace(
            plan,
            stages=tuple(
                replace(stage, recompute=not stage.recompute) if stage.devices == devices else stage
                for stage in plan.stages
            ),
        )


def shifted_devices(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """A device of one group given to the next group or the one before; the order kept."""
    groups = plan.device_groups
    for giver, taker in ((g, t) for g in range(len(groups)) for t in (g - 1, g + 1)):
        if not 0 <= taker < len(groups) or len(groups[giver]) < 2:
            continue
        if len(groups[taker]) >= plan.micro_batch_size:
            continue
        changed = list(groups)
        if taker < giver:
            changed[taker] = (*groups[taker], groups[giver][0])
            changed[giver] = groups[giver][1:]
        else:
            changed[taker] = (groups[giver][-1], *groups[taker])
            changed[giver] = groups[giver][:-1]
        yield on_groups(problem, plan, dict(zip(groups, changed, strict=True)))


def on_groups(
    problem: PlanningProblem, plan: Plan, new: dict[tuple[int, ...], tuple[int, ...]]
) -> Plan:
    """The plan with its groups of devices replaced."""
    slices = {
        devices: rows_by_speed(problem.cluster, devices, plan.micro_batch_size)
        for devices in new.values()
    }
    return replace(
        plan,
        stages=tuple(
            replace(s, devices=new[s.devices], slices=slices[new[s.devices]]) for s in plan.stages
        ),
    )
