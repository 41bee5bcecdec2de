"""The default planner: arms share a budget of simulated actions, and each pull improves one arm.

Load, bound, quick simulation, exact simulation: each judges fewer plans than the one before, and
more exactly. `docs/how-it-works/planning.md` explains it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise, product
from math import inf

from penstock.core.native import Found, LoadQuestion, Point, random_walk
from penstock.costs.fit import plan_fits
from penstock.costs.infeasible import infeasible
from penstock.costs.lower_bound import gap, lower_bound_s, plan_bound_s
from penstock.costs.schedule_costs import priced
from penstock.costs.tables import costs_with
from penstock.plan.plan import Plan, with_cut, with_order
from penstock.plan.problem import Planner, PlanningProblem, Score, dividing, in_blocks
from penstock.planners.registry import STARTING_PLANNERS
from penstock.planners.search.arms import POOL, Arm, ArmPoint, arms_of, quick_point
from penstock.planners.search.every_plan import every_placement, every_variant
from penstock.planners.search.judge import MAKING_A_PLAN, Judge, SearchStep, actions_of
from penstock.planners.search.points import plan_of_point, point_of
from penstock.planners.search.preference import preferred
from penstock.planners.variants import cheap_plans, every_plan_of

BUDGET = 3_000_000
"""Simulated actions of a search, each of some microseconds of CPU."""

WALK_STEPS, HEAT = 25_000, 0.02
"""Points of a load walk on at most 16 devices; the share by which slower ones are accepted."""

KINDS = ((0.0, False), (30.0, False), (30.0, True), (15.0, True))
"""The loads that walks of a pull compare: a power, and whether it is steady (`plan_load.hpp`)."""

RANKED = 24
"""Points of a walk that are simulated quickly."""

EXACT = 4
"""Points of a pull that are simulated exactly, before the climb."""

TOLERANCE = 0.01
"""The share by which neighbours may be slower, quickly simulated, that are simulated exactly."""

POLISHED, POLISH = 0.02, 0.1
"""Gap to the best plan up to which the exact simulation moves the cuts of an arm's best plan, and
the share of the budget for that."""

EVEN = 24
"""Even points of an arm that are simulated quickly."""

FAR, NEAR = 1.2, 1.05
"""Multiples of the best plan's time that an arm's even points may take for it to be pulled at all,
and an arm's best plan, for the quarter of the budget that goes to such arms in turn."""

PROVEN, IDLE = 0.005, 0.2
"""The gap to the bound, and the share of the budget without an improvement, after which the search
stops."""

ACTIONS_FOR_ALL = 3_000_000
"""Simulated actions for all plans of a small problem."""

SMALL_CLUSTER, SMALL_PROBLEM = 4, 6000
"""Devices and placements up to which all plans are simulated, those with the least bound first."""

QUICK, WALKED = 0.04, 0.04
"""The cost, in simulated actions, of one in the quick simulation; and of a stage or of ten layers
in a step of a walk, which costs ten more."""


@dataclass
class ArmSearch:
    """A search with its arms and what is left of its budget."""

    problem: PlanningProblem
    judge: Judge
    arms: list[Arm]
    budget: float
    left: float = field(init=False)
    number: int = 0
    idle_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.idle_at = self.budget

    def charge(self, arm: Arm) -> None:
        """Take the quick actions of an arm since the last time from the budget."""
        self.left -= QUICK * (arm.play.spent - arm.charged)
        arm.charged = arm.play.spent

    def pull(self, arm: Arm) -> None:
        """Walk from a point of the arm, simulate the best exactly, climb from the best plan."""
        before_s, before = arm.best_s, self.left
        is_fresh = not any(other.pulls for other in self.arms if other.is_twin_of(arm))
        self.judge_pool(arm)
        for found in self.walked(arm):
            for twin in self.arms:
                if twin is arm or twin.is_twin_of(arm):
                    twin.add(found)
        self.judge_pool(arm)
        if arm.best_s <= NEAR * self.judge.best_s:
            self.climb(arm)
        is_near = arm.best_s <= (1 + POLISHED) * self.judge.best_s
        if arm.best_s == before_s and is_near and arm.best_plan not in arm.polished:
            self.polish(arm)
        arm.pulls += 1
        arm.gain = 1 - arm.best_s / before_s if 0 < before_s < inf else 0.0
        arm.stale = 0 if arm.best_s < before_s * (1 - 1e-4) else arm.stale + 1
        if arm.stale == 0:
            self.idle_at = self.left
        elif is_fresh:
            # The first pull of a placement is a look at it.
            self.idle_at -= before - self.left
        if arm.best and arm.best_s < before_s:
            for other in self.arms:
                if other is not arm:
                    self.share(other, arm, arm.best.point)

    def walked(self, arm: Arm) -> list[Found]:
        """Return points of little load on walks, each in its quickest variant."""
        # Twins give one another what they find, so none walks where another did.
        number = sum(other.pulls for other in self.arms if other.is_twin_of(arm))
        seed, rules = arm.seed(number), arm.rules
        starts = [one.point for one in arm.pool]
        if not starts:
            return []
        devices = len(self.problem.cluster.devices)
        steps = int(WALK_STEPS * (16 / max(16, devices)) ** 0.75)
        points: list[Point] = []
        for place, (power, steady) in enumerate(KINDS[number % 2 :: 2], start=seed):
            # The best every other time.
            start = starts[0 if place % 2 == 0 else place % len(starts)]
            by_block = 2 in start.recompute
            costs = costs_with(self.problem, max(start.sharding), by_block=by_block)
            # Never, where it is faster, always; costs by block have recompute in their backwards.
            recompute = 0 if by_block or 1 not in rules.recomputes else 2 - (0 in rules.recomputes)
            question = LoadQuestion(recompute, power, steady and not rules.split)
            found = random_walk(costs, rules, start, question, HEAT, steps, place)
            stages = start.groups * rules.rounds
            self.left -= WALKED * steps * (10 + stages + len(self.problem.profile.layers) / 10)
            points += [at_depth(one.point) for one in found[:RANKED]]
        limit_s = FAR * max(self.judge.best_s, arm.first_s)
        points.sort(key=lambda point: arm.play.seconds(point, limit_s))
        best = [arm.play.best_variant(point, limit_s) for point in points[: POOL // 2]]
        self.charge(arm)
        return best

    def share(self, taker: Arm, giver: Arm, point: Point) -> None:
        """Give a point to another arm: as it is, or its groups with even cuts."""
        if not taker.rules.least_groups <= point.groups <= taker.rules.most_groups:
            return
        other = at_depth(point)
        if (taker.style, taker.rounds) != (giver.style, giver.rounds):
            taker.play.even_cuts(other)
        if not taker.rules.allows(other):
            return
        found = taker.play.best_variant(other, FAR * self.judge.best_s)
        taker.add(found)
        self.charge(taker)
        is_near = giver.best_s <= (1 + POLISHED) * self.judge.best_s
        if is_near and (taker.style, taker.rounds) == (giver.style, giver.rounds):
            self.simulate(taker, quick_point(found), taker.schedules)

    def judge_pool(self, arm: Arm) -> None:
        """Simulate the quickest points of the pool exactly that are not yet, so it is in order."""
        for _ in range(1 if arm.is_searched else EXACT):
            one = next((kept for kept in arm.pool[:3] if not kept.is_exact), None)
            # The quick simulation may err by more before the arm has been looked at.
            limit_s = (NEAR if arm.pulls else FAR) * self.judge.best_s
            if one is None or arm.estimate_s(one) > limit_s or self.left < 0:
                break
            self.simulate(arm, one)

    def simulate(self, arm: Arm, one: ArmPoint, names: tuple[str, ...] = ()) -> float:
        """Simulate a point under the schedule that led, or at first under all; its seconds."""
        best_s = inf
        for name in names or ((arm.lead,) if arm.lead else arm.schedules):
            plan = plan_of_point(self.problem, arm.rules, one.point, name, one.depths)
            seconds = self.exact_s(plan)
            best_s = min(best_s, seconds)
            if seconds < arm.best_s:
                arm.best = replace(one, seconds=seconds, is_exact=True)
                arm.best_plan, arm.lead = plan, name
        if not one.is_exact and one.seconds > 0 and best_s < inf:
            arm.ratios.append(best_s / one.seconds)
        arm.pool = [kept for kept in arm.pool if kept.point != one.point]
        arm.put(replace(one, seconds=best_s, is_exact=True))
        if best_s == inf and one.point.recompute == [0] * one.point.groups:
            self.save(arm, one.point)
        return best_s

    def save(self, arm: Arm, point: Point) -> None:
        """Add the point with everything recomputed: its order does not fit in memory otherwise."""
        for recompute in arm.rules.recomputes[1:]:
            other = Point(
                point.order, point.starts, point.cuts, [recompute] * point.groups,
                point.sharding, size=point.size, depth=point.depth,
            )  # fmt: skip
            one = arm.quick(other)
            if one.seconds < inf:
                arm.put(one)

    def exact_s(self, plan: Plan) -> float:
        """Simulate a plan exactly, for its actions."""
        if plan not in self.judge.seconds:
            self.left -= actions_of(plan)
        return self.judge.simulate(plan)

    def climb(self, arm: Arm, *, keep_groups: bool = False) -> None:
        """Move on from the arm's best point to a neighbour as long as one is faster.

        Neighbours are ranked by the quick simulation, and the first few are simulated exactly. With
        ``keep_groups`` only those with the same sets of devices are.
        """
        while arm.best and arm.best_plan not in arm.climbed and self.left > 0:
            arm.climbed.add(arm.best_plan)
            here, quick_s = arm.best, arm.play.seconds(arm.best.point, inf)
            found = arm.play.neighbours(here.point, quick_s * (1 + TOLERANCE), EXACT)
            self.charge(arm)
            if keep_groups:
                found = [one for one in found if groups_of(one.point) == groups_of(here.point)]
            for one in found[: 2 if arm.is_searched else EXACT]:
                plan_s = self.simulate(arm, quick_point(one))
                if plan_s < here.seconds or self.left < 0:
                    break

    def polish(self, arm: Arm) -> None:
        """Move cuts of the arm's best plan by the exact simulation, as long as that is faster.

        The plan keeps its order, which takes long to make. At last it gets one for its own costs.
        """
        plan, seconds, least = arm.best_plan, arm.best_s, self.left - POLISH * self.budget
        improves = plan is not None
        while plan and improves:
            improves = False
            for s, step in product(range(1, len(plan.stages)), (1, -1, 2, -2)):
                before, after = plan.stages[s - 1].layers, plan.stages[s].layers
                if not before.start < after.start + step < after.stop or self.left < least:
                    continue
                other = with_cut(plan, s, after.start + step)
                self.left -= actions_of(with_order(other, "1f1b"))
                other_s = self.judge.simulate(other)
                if other_s < seconds:
                    plan, seconds, improves = other, other_s, True
        if plan and seconds < arm.best_s:
            best = priced(self.problem, plan)
            self.exact_s(best)
            self.start_from(best)
        arm.polished.add(arm.best_plan)

    def first_plans(self) -> Iterator[SearchStep]:
        """Simulate the quickest even points of all arms; where none fits, what planners find."""
        made: list[Arm] = []
        best_s = inf
        for arm in self.arms:
            # Generators of the same orders have the same even points.
            twin = next((other for other in made if other.is_twin_of(arm)), arm)
            if twin is arm:
                for found in even_points(self.problem, arm, inf):
                    arm.add(found)
                    best_s = min(best_s, found.seconds)
                self.charge(arm)
            arm.pool = list(twin.pool)
            made.append(arm)
        yield self.judge.step("even points")
        for arm in sorted(self.arms, key=lambda arm: arm.promise_s):
            if arm.pool and arm.pool[0].seconds < FAR * self.judge.best_s:
                self.simulate(arm, arm.pool[0])
                yield self.judge.step(arm.title)
        if self.problem.pins or self.judge.best_s == inf:
            for plan in every_plan_of(self.problem, self.judge.score):
                self.start_from(plan)
            yield self.judge.step("planners")

    def start_from(self, plan: Plan) -> None:
        """Simulate a plan, and add it to the arms that have its placement."""
        self.exact_s(plan)
        for arm in self.arms:
            point = point_of(self.problem, arm.rules, plan)
            if point is not None:
                one = arm.quick(point)
                if arm.estimate_s(one) <= NEAR * self.judge.best_s:
                    self.simulate(arm, one)
                elif one.seconds < inf:
                    arm.put(one)

    def pulls(self, bound_s: float) -> Iterator[SearchStep]:
        """Pull arms until the budget is spent, the bound is near or nothing has improved."""
        self.idle_at = self.left
        while self.left > 0 and gap(self.judge.best_s, bound_s) > PROVEN:
            arm = self.next_arm()
            if arm is None or self.idle_at - self.left > IDLE * self.budget:
                return
            self.pull(arm)
            self.number += 1
            yield self.judge.step(arm.title)

    def ask_planners(self) -> Iterator[SearchStep]:
        """Run the cheap planners, try their stages in all arms, and climb from what is better."""
        for plan in cheap_plans(self.problem, self.judge.score):
            before_s = self.judge.best_s
            self.start_from(plan)
            if self.judge.best_s < before_s:
                self.left = max(self.left, self.budget / 10)
                for arm in self.arms:
                    if arm.best_s < before_s:
                        self.climb(arm)
            yield self.judge.step("planners")

    def next_arm(self) -> Arm | None:
        """Return the arm to pull: each once, then the most promising, or a near one in turn."""
        best_s = self.judge.best_s
        pulled = [arm for arm in self.arms if arm.pulls]
        tried = [arm for arm in self.arms if arm.pulls or any(map(arm.is_twin_of, pulled))]
        fresh = [arm for arm in self.arms if arm not in tried and arm.pool]
        # Walks gain most where every group has one stage.
        fresh = [arm for arm in fresh if arm.is_straight or arm.promise_s < FAR * best_s]
        if fresh:
            return min(fresh, key=lambda arm: (not arm.is_straight, arm.promise_s))
        near = [arm for arm in tried if arm.first_s <= NEAR * best_s]
        if near and self.number % 4 == 3:
            return min(near, key=lambda arm: (arm.pulls, arm.best_s))
        return min(tried, key=lambda arm: arm.promise_s, default=None)


def groups_of(point: Point) -> set[frozenset[int]]:
    """Return the sets of devices of a point."""
    return {frozenset(point.order[a:b]) for a, b in pairwise(point.starts)}


def at_depth(point: Point) -> Point:
    """Return a copy without limits of its own."""
    other = Point(point)
    other.limits = []
    return other


def even_points(problem: PlanningProblem, arm: Arm, best_s: float) -> list[Found]:
    """Return the quickest points on equal groups of devices for each number of groups.

    Those that take far longer than ``best_s`` are left out.
    """
    devices, order = len(problem.cluster.devices), list(range(len(problem.cluster.devices)))
    rules, play = arm.rules, arm.play
    bounds: list[tuple[float, tuple[int, int], Point]] = []
    for groups in range(rules.least_groups, rules.most_groups + 1):
        for width in {devices // groups, 1}:
            starts = [g * width for g in range(groups + 1)]
            for index, size in enumerate(rules.sizes):
                if width > size:
                    continue
                point = arm.even_point(order, starts, index)
                if not rules.allows(point):
                    continue
                bound_s = play.seconds(point, 0.0)
                if bound_s == inf:
                    leaner = play.best_variant(point, inf)
                    bound_s, point = leaner.seconds, leaner.point
                if bound_s < inf:
                    bounds.append((bound_s, (groups, width), point))
    quick: dict[tuple[int, int], tuple[float, Point]] = {}
    left = EVEN
    for bound_s, kind, point in sorted(bounds, key=lambda one: one[0]):
        least_s = quick[kind][0] if kind in quick else inf
        if bound_s < least_s and left > 0:
            left -= 1
            seconds = play.seconds(point, least_s)
            if seconds < least_s:
                quick[kind] = seconds, point
                best_s = min(best_s, seconds)
    best = sorted(quick.values(), key=lambda one: one[0])[: POOL // 2]
    return [play.best_variant(point, 2 * best_s) for _, point in best]


def search_steps(
    problem: PlanningProblem, score: Score, effort: float = 1.0
) -> Iterator[SearchStep]:
    """Yield ever better plans, each with what is being tried; the last step has the one to choose.

    1. Even points of all arms, and the quickest of each simulated exactly.
    2. Pulls of the arms, until the budget times ``effort`` is spent, the gap to the bound is small,
       or nothing has improved for a while.
    3. The plans of cheap published planners, and of all if nothing fits yet.
    4. On small problems every plan that its bound does not rule out.
    5. Of all plans that are about as fast as the best, the one that people would choose.

    The last step has no plan where nothing fits.
    """
    judge = Judge(problem, score)
    search = ArmSearch(problem, judge, arms_of(problem, problem.schedules), BUDGET * effort)
    yield from search.first_plans()
    bound_s = lower_bound_s(problem)
    yield from search.pulls(bound_s)
    yield judge.step("planners")
    yield from search.ask_planners()
    if gap(judge.best_s, bound_s) > 5e-4:
        yield from simulate_all(judge)
    answer = judge.step("done")
    if answer.plan is not None:
        plan, seconds = preferred(problem, dict(judge.fastest()), score)
        answer = SearchStep("done", plan, seconds)
    yield answer


def rescheduled(problem: PlanningProblem, plan: Plan, schedule: str, score: Score) -> Plan | None:
    """Return the best plan found under ``schedule`` on the sets of devices of ``plan``, if any."""
    groups = set(plan.device_groups)
    judge = Judge(problem.under((schedule,)), score)
    search = ArmSearch(judge.problem, judge, arms_of(judge.problem, (schedule,)), BUDGET / 10)
    for arm in search.arms:
        starts = [0, *accumulate(map(len, plan.device_groups))]
        order = list(dict.fromkeys((*plan.devices, *range(len(problem.cluster.devices)))))
        for index, size in enumerate(arm.rules.sizes):
            near = size in (plan.micro_batch_size * k // 2 for k in (1, 2, 4))
            if not near or max(map(len, groups)) > size or len(groups) > arm.rules.most_groups:
                continue
            arm.add(arm.play.best_variant(arm.even_point(order, starts, index), inf))
        same = with_order(plan, schedule)
        if point_of(judge.problem, arm.rules, same):
            search.start_from(same)
        search.judge_pool(arm)
        search.climb(arm, keep_groups=True)
    found = ((other, s) for other, s in judge.fastest() if set(other.device_groups) == groups)
    best = next(found, None)
    return replace(best[0], planner=plan.planner) if best else None


def simulate_all(judge: Judge) -> Iterator[SearchStep]:
    """Simulate every plan that its bound does not rule out, if the problem is small."""
    known = [name for name in judge.problem.schedules if name in PlanningProblem.schedules]
    if len(judge.problem.cluster.devices) > SMALL_CLUSTER or not known:
        return
    problem = judge.problem.under(tuple(known))
    placements = list(islice(every_placement(problem), SMALL_PROBLEM + 1))
    if len(placements) > SMALL_PROBLEM:
        return
    yield judge.step("all plans")
    bounds, actions = [plan_bound_s(problem, plan) for plan in placements], ACTIONS_FOR_ALL
    for i in sorted(range(len(placements)), key=bounds.__getitem__):
        best_s, _ = judge.best_of(known)
        if bounds[i] > best_s or actions <= 0:
            return
        variants = every_variant(problem, placements[i])
        first = next(variants)
        # One micro-batch in flight needs the least memory, and recompute saves nothing then.
        if plan_fits(problem, first) or not first.in_flight_limit:
            for plan in chain([first], variants):
                # A bound takes about as long as making a plan.
                actions -= MAKING_A_PLAN
                if plan_bound_s(problem, plan) < judge.best_of(known)[0]:
                    actions -= actions_of(plan)
                    judge.simulate(plan)
                if actions <= 0:
                    break


def search(
    problem: PlanningProblem,
    score: Score,
    effort: float = 1.0,
    on_step: Callable[[SearchStep], bool] = lambda step: False,
) -> Plan:
    """Run `search_steps`: to the end, or until there is a plan and ``on_step`` returns True."""
    # Both are refused here where no schedule goes with them.
    if problem.blocks == "always":
        in_blocks(problem)
    if problem.sharding not in ("auto", "off"):
        dividing(problem, problem.sharding)
    best = None
    for step in search_steps(problem, score, effort):
        best = step.plan
        if on_step(step) and best is not None:
            break
    if best is None:
        raise infeasible(problem, "search")
    return replace(best, planner="search")


PLANNERS: dict[str, Planner] = {"search": search, **STARTING_PLANNERS}
"""All planners by name, the default one first."""
