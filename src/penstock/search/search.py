"""The default planner: starts from what the others make, and is judged by the simulator."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from math import inf

from numpy.random import default_rng

from penstock.bounds.lower_bound import gap, lower_bound_s, plan_bound_s
from penstock.errors import Infeasible
from penstock.plan.cost import peak_memory_bytes
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import Planner, PlanningProblem, Score
from penstock.schedule.registry import FAMILIES
from penstock.search.climbs import climbed_plans
from penstock.search.depths import actions_of, deeper_variants, walked_depths
from penstock.search.every_plan import every_placement, every_variant
from penstock.search.families import FamilySearch, family_steps, plain_families
from penstock.search.loads import evenly_loaded_plans
from penstock.search.moves import neighbours
from penstock.search.preference import preferred
from penstock.search.seeds import Climber
from penstock.search.skeletons import Skeleton, skeletons, skeletons_of_plans
from penstock.search.step import SearchStep

__all__ = ["search_from", "search_steps"]

ACTIONS_FOR_CANDIDATES = 4_000_000
"""Simulated actions spent on the plans that the estimate ranks first; about a second."""

ACTIONS_FOR_MOVES = 4_000_000
"""Simulated actions spent on moves from the best plan."""

CANDIDATES = 60
"""The most plans of the estimate that are simulated."""

MOVES = 600
"""The most moves that are simulated."""

PROVEN = 5e-4
"""A gap up to which a plan counts as good enough: the bound itself is no more precise."""

WORTH_LOADING = 0.02
"""The gap from which evenly loaded plans are tried."""

ROUNDS_OF_LOADS = 2
"""Rounds of walks to evenly loaded plans; on 16 devices one takes about three seconds."""

MOST_LOADED = 64
"""No such walks on more devices."""

DEPTHS_WALKED = 3e6
"""Simulated actions of a walk over depths and recompute; they take about three seconds."""

WALKED = 16 * 40
"""Devices times layers for which such walks are so long; for less they are shorter."""

LEADING = 6
"""So many of the best plans with whole backwards are tried under other schedules."""

SMALL_CLUSTER, SMALL_PROBLEM = 4, 6000
"""Devices and placements up to which a problem counts as small: then all plans are looked at."""


def search_from(starts: Mapping[str, Planner]) -> Planner:
    """The planner that runs `search_steps` to the end."""

    def search(problem: PlanningProblem, score: Score) -> Plan:
        best: Plan | None = None
        for step in search_steps(problem, score, starts):
            best = step.plan
        if best is None:
            raise infeasible(problem, "search")
        return best

    return search


def search_steps(
    problem: PlanningProblem, score: Score, starts: Mapping[str, Planner]
) -> Iterator[SearchStep]:
    """Ever better plans, each with what is being tried; the last step has the best of all.

    1. Plans under the schedules that planners do not know (`family_steps`), on equal groups of
       devices.
    2. The plans of ``starts``, the other planners; so the answer is never worse than theirs under
       the same score. Then further ones with whole backwards and one stage a device
       (`whole_backward_steps`), but where no such plan can win: where their proven bound is not
       below the best time.
    3. The devices and the layers of the best of 2, under the schedules of 1.
    4. Of all plans judged that are about as fast as the best, and of those on other devices of the
       same kinds, the one that people would choose (`preferred`).

    The last step has no plan where nothing fits.
    """
    known = tuple(name for name in problem.schedules if name in PlanningProblem.schedules)
    known = known or tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    others = tuple(name for name in problem.schedules if name not in known)
    whole = replace(problem, schedules=known or PlanningProblem.schedules) if others else problem
    best = Incumbent(whole, score)
    families = FamilySearch(replace(problem, schedules=others or problem.schedules), score)
    answer = SearchStep("", None, inf)

    def may_win() -> bool:
        """Whether a plan with whole backwards can win."""
        return not known or best.bound_s * (1 + PROVEN) < answer.seconds

    def phases() -> Iterator[Iterator[SearchStep]]:
        if others:
            yield family_steps(
                families, skeletons(families.problem, plain_families(families.problem))
            )
        yield bound_step(best)
        yield planner_steps(best, starts)
        if may_win():
            yield whole_backward_steps(best)
        if others:
            yield family_steps(families, starts_of(best, families.problem))

    for phase in phases():
        for step in phase:
            allowed = step.plan is not None and step.plan.schedule in problem.schedules
            better = allowed and step.seconds < answer.seconds
            answer = step if better else replace(answer, doing=step.doing)
            yield answer
    judged = {**best.tried, **families.judged}
    allowed = {
        plan: s for plan, s in judged.items() if s < inf and plan.schedule in problem.schedules
    }
    if allowed:
        plan, seconds = preferred(problem, allowed, score)
        answer = SearchStep("", replace(plan, planner="search"), seconds)
    yield replace(answer, doing="done")


def bound_step(best: "Incumbent") -> Iterator[SearchStep]:
    """Prove the bound of plans with whole backwards."""
    yield best.step("lower bound")
    best.bound_s = lower_bound_s(best.problem)


def starts_of(best: "Incumbent", problem: PlanningProblem) -> Iterator[Skeleton]:
    """Good plans with whole backwards as starts for other schedules."""
    plans = [*best.leading(), *best.loaded]
    return skeletons_of_plans(problem, plain_families(problem), plans)


def planner_steps(best: "Incumbent", starts: Mapping[str, Planner]) -> Iterator[SearchStep]:
    """The plans of the other planners."""
    for name, planner in starts.items():
        yield best.step(f"planner {name}")
        try:
            best.offer(planner(best.problem, best.score))
        except Infeasible:
            continue
    yield best.step("planners")


def whole_backward_steps(best: "Incumbent") -> Iterator[SearchStep]:
    """Ever better plans with whole backwards and one stage a device.

    1. The plans that hill climbing by a fast estimate ends in (`climbs`), simulated in the
       order of their estimates.
    2. Moves from the best plan, as long as one makes it better (`penstock.search.moves`).
    3. Plans that load devices and links evenly (`load_evenly`), where the bound leaves room.
    4. On small problems every plan there is (`every_plan`), but those whose proven bound shows
       that they cannot win; there the answer is optimal.

    1 to 3 end as soon as the best plan meets the bound. Of equal plans that on the fewest devices
    wins.
    """
    # Schedules that the fast estimate does not know are only moved.
    known = bool(best.climber.ways())
    for phase in (climb_hills, improve, load_evenly) if known else (improve,):
        if best.gap > PROVEN:
            yield from phase(best)
    yield from look_at_all(best)
    yield best.step("done")


@dataclass
class Incumbent:
    """The best plan so far, which plans were tried, and those that load devices evenly."""

    problem: PlanningProblem
    score: Score
    plan: Plan | None = None
    seconds: float = inf
    bound_s: float = 0.0
    tried: dict[Plan, float] = field(default_factory=dict[Plan, float])
    loaded: list[Plan] = field(default_factory=list[Plan])

    @cached_property
    def climber(self) -> Climber:
        """Climbs for this problem, whose arrays are made once."""
        return Climber(self.problem)

    @property
    def gap(self) -> float:
        """By how much the best plan is slower than the bound, as a part of the bound."""
        return gap(self.seconds, self.bound_s)

    def offer(self, plan: Plan) -> bool:
        """Try a plan; whether it is better. One that provably cannot win is not simulated."""
        plan = replace(plan, planner="search")
        if plan in self.tried:
            return False
        self.tried[plan] = inf
        if plan_bound_s(self.problem, plan) > self.seconds:
            return False
        seconds = self.tried[plan] = self.score(plan)
        smaller = self.plan is not None and len(plan.devices) < len(self.plan.devices)
        if seconds < self.seconds or (seconds == self.seconds < inf and smaller):
            self.plan, self.seconds = plan, seconds
            return True
        return False

    def spend(self, actions: float, plans: Iterable[Plan]) -> None:
        """Try plans until so many actions have been simulated."""
        for plan in plans:
            before = len(self.tried)
            self.offer(plan)
            if len(self.tried) > before:
                actions -= actions_of(plan)
            if actions <= 0 and self.plan is not None:
                return

    def leading(self) -> list[Plan]:
        """The fastest plans that were tried, each on other devices or with other stages' ends."""
        found: dict[object, Plan] = {}
        for plan in sorted(self.tried, key=self.tried.__getitem__):
            if self.tried[plan] == inf or len(found) == LEADING:
                break
            found.setdefault(tuple(map(len, plan.device_groups)), plan)
        return list(found.values())

    def step(self, doing: str) -> SearchStep:
        """What is known now."""
        return SearchStep(doing, self.plan, self.seconds)


def climb_hills(best: Incumbent) -> Iterator[SearchStep]:
    """Simulate the plans that hill climbing ends in."""
    yield best.step("hill climbing")
    for candidates in climbed_plans(best.climber, best.plan):
        best.spend(ACTIONS_FOR_CANDIDATES, islice(candidates, CANDIDATES))
        yield best.step("hill climbing")


def load_evenly(best: Incumbent) -> Iterator[SearchStep]:
    """Plans that load devices and links evenly.

    Each gets the schedule, depth and recompute that suit it best. What is best after a round is
    where the walks of the next start.
    """
    problem = best.problem
    many = len(problem.cluster.devices) > MOST_LOADED
    if many or best.gap < WORTH_LOADING:
        return
    for seed in range(ROUNDS_OF_LOADS):
        yield best.step("even loads")
        if best.plan is None:
            return
        before_s = best.seconds
        loaded = list(evenly_loaded_plans(best.climber, best.plan, seed))
        best.loaded += loaded
        plan = best_variant(best, loaded)
        if plan is not None:
            yield best.step("even loads")
            generator = default_rng([len(problem.profile.layers), seed])
            actions = DEPTHS_WALKED * part_walked(problem)
            best.offer(walked_depths(problem, best.score, plan, generator, actions))
        if best.seconds < before_s:
            yield from improve(best)


def part_walked(problem: PlanningProblem) -> float:
    """How long walks are on a problem, as a part of the longest."""
    return min(1.0, len(problem.cluster.devices) * len(problem.profile.layers) / WALKED)


def best_variant(best: Incumbent, plans: Iterable[Plan]) -> Plan | None:
    """The fastest of the `deeper_variants` of plans; it is offered too."""
    found_s, found = inf, None
    for plan in plans:
        for variant in deeper_variants(best.problem, plan):
            seconds = best.score(variant)
            if seconds < found_s:
                found_s, found = seconds, variant
    if found is not None:
        best.offer(found)
    return found


def improve(best: Incumbent) -> Iterator[SearchStep]:
    """Move from the best plan to a better neighbour until there is none."""
    actions, moves = ACTIONS_FOR_MOVES, MOVES
    improved = best.plan is not None
    while improved and best.plan is not None:
        improved = False
        yield best.step("moves")
        for neighbour in neighbours(best.problem, best.plan):
            if neighbour in best.tried:
                continue
            improved |= best.offer(neighbour)
            actions, moves = actions - actions_of(neighbour), moves - 1
            if actions <= 0 or moves <= 0:
                return


def look_at_all(best: Incumbent) -> Iterator[SearchStep]:
    """On a small problem try every plan that its bound does not rule out."""
    problem = best.problem
    if len(problem.cluster.devices) > SMALL_CLUSTER:
        return
    placements = list(islice(every_placement(problem), SMALL_PROBLEM + 1))
    if len(placements) > SMALL_PROBLEM:
        return
    yield best.step("all plans")
    bounds = [plan_bound_s(problem, plan) for plan in placements]
    for i in sorted(range(len(placements)), key=bounds.__getitem__):
        if bounds[i] > best.seconds:
            return
        variants = every_variant(problem, placements[i])
        first = next(variants)
        # With one micro-batch in flight a recompute saves nothing, so nothing is leaner.
        if fits(problem, first) or not first.in_flight_limit:
            for plan in chain([first], variants):
                best.offer(plan)


def fits(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether every device of a plan has the memory that it needs."""
    devices = problem.cluster.devices
    peaks = peak_memory_bytes(problem, plan)
    return all(
        peak <= devices[device].memory_bytes
        for peak, device in zip(peaks, plan.devices, strict=True)
    )
