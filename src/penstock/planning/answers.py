"""A planner's answer: a plan, found within a time limit where one is given."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from penstock.bounds.lower_bound import gap, lower_bound
from penstock.cluster.cluster import with_boundless_memory
from penstock.errors import BadInput, Infeasible
from penstock.plan.cost_tables import whole_chain
from penstock.plan.fitted_plan import with_needed_recompute
from penstock.plan.infeasible import ONE_STAGE_PLANNERS, first_fitting, infeasible
from penstock.plan.pins import pins_text
from penstock.plan.plan import SHARDINGS, Plan, with_recompute
from penstock.plan.problem import PlanningProblem, Score, dividing, in_blocks, score_of
from penstock.plan.sharding import with_sharding
from penstock.planners.data_parallel import dividing_plan
from penstock.planning.planning_problem import member_named
from penstock.planning.tensor_groups import groupings, plan_with_groups
from penstock.schedule.registry import FAMILIES
from penstock.search.families import rescheduled
from penstock.search.judge import Judge, SearchStep
from penstock.search.neighbours import climb
from penstock.search.search import ALONE, PLANNERS, STARTING_PLANNERS, search_steps
from penstock.simulate.score import make_score, predict_plan

NEARLY_FULL = 0.5
"""From this share of a device's memory on, a plan counts as limited by it: a micro-batch more, or
one twice as large, might not fit."""

QUICK = "dynamic-program"
"""The planner that `search` asks for plans by block if others fit. With `search` itself, planning
GNMT and Inception v3 on 16 V100 took twice as long, and no plan was faster by 0.1 %."""

ACTIONS_FOR_MIXED = 200_000
"""Simulated actions for moves among plans of which some stages recompute by block."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Seconds that planning may take, and the clock that they are read from."""

    seconds: float
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Question:
    """What a planner is asked, until when by which clock, and who is told of its steps."""

    problem: PlanningProblem
    planner: str
    score: Score
    until: tuple[float, Callable[[], float]] | None
    on_step: Callable[[SearchStep], None] | None

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.until is not None and self.until[1]() > self.until[0]

    def limited(self, score: Score) -> Score:
        """``score``, with infinite seconds for new plans once the time is up (`score_until`)."""
        return score_until(score, *self.until) if self.until else score

    def tell(self, step: SearchStep) -> None:
        if self.on_step:
            self.on_step(step)


def find_plan(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    *,
    sizes: Sequence[int] = (),
    limit: TimeLimit | None = None,
    on_step: Callable[[SearchStep], None] | None = None,
) -> Plan:
    """What the planner of that name answers.

    Where stages may recompute by block, plans that do so on all stages are tried if nothing else
    fits. For `search`, and for plans of one stage, they are also tried if memory is nearly full.
    `search` then lets each stage recompute as it can. Where devices may divide what they like,
    `search` also tries ZeRO-1 and FSDP on all devices; if memory is nearly full and the bound is
    not near, plans in which all stages divide the same, and moves to others in which each does as
    it can; if these gain much, it searches once more for plans that divide the same everywhere.

    After the time limit the best plan so far is the answer. At least one plan that fits is found,
    however long that takes. ``on_step`` is called with every step. The plan may have tensor groups
    of the ``sizes``, if any (`plan_with_groups`). All ways to divide the cluster share the time
    limit equally, and only the steps without groups are told.

    A published planner does not know all schedules. For the others, its plan for the schedules that
    it knows provides the devices (`penstock.search.families.rescheduled`).

    Raises:
        BadInput: no planner has the name, the profile does not say what a tensor group divides, or
            a pin names devices where tensor groups are asked for.
        Infeasible: nothing fits; the message says what would. Or no plan of the planner keeps the
            pins.
    """
    member_named(PLANNERS, planner, "planner")
    if sizes:
        check_groups(problem)
        ways = sum(1 for _ in groupings(problem.cluster, sizes))
        part = replace(limit, seconds=limit.seconds / ways) if limit else None

        def find(view: PlanningProblem, own: Score) -> Plan:
            told = on_step if view is problem else None
            view = view if view is problem else replace(view, sharding="off")
            return find_plan(view, planner, own, limit=part, on_step=told)

        return plan_with_groups(problem, sizes, find).plan
    until = (limit.clock() + limit.seconds, limit.clock) if limit else None
    try:
        return answer(Question(problem, planner, score, until, on_step))
    except Infeasible as refusal:
        if not problem.pins:
            raise
        raise pins_refused(problem, planner, refusal) from None


def check_groups(problem: PlanningProblem) -> None:
    """Raise `BadInput` if a pin names devices, which are groups in plans with tensor groups.

    And where devices are to divide what groups divide already.
    """
    if problem.sharding not in ("auto", "off"):
        raise BadInput(
            f"--sharding {problem.sharding} does not go with tensor groups, which divide layers "
            f"already; leave out one of them"
        )
    for pin in problem.pins:
        if pin.devices:
            raise BadInput(
                f"pin '{pin.text}' names devices, and with tensor groups a plan's devices are the "
                f"groups; leave out the pin or --tensor-parallel"
            )


def pins_refused(problem: PlanningProblem, planner: str, refusal: Infeasible) -> Infeasible:
    """Why a planner found no plan: nothing fits at all, it cannot keep pins, or one is too much."""
    free = replace(problem, pins=())
    if first_fitting(free, whole_chain(free)) is None:
        return refusal
    if planner != "search":
        return Infeasible(
            f"planner '{planner}' proposes no plan that keeps {pins_text(problem.pins)}; use "
            f"planner 'search', or leave a pin out"
        )
    from penstock.planners.pinned import pinned

    for pin in problem.pins:
        others = replace(problem, pins=tuple(other for other in problem.pins if other != pin))
        with suppress(Infeasible):
            if others.pins:
                pinned(others, make_score(others))
            return Infeasible(
                f"no plan that keeps pin '{pin.text}' fits in memory, and without it one does; "
                f"leave it out, or allow recompute or smaller micro-batches"
            )
    return Infeasible(
        f"no plan that keeps {pins_text(problem.pins)} fits in memory; leave some out"
    )


def answer(asked: Question) -> Plan:
    """As `find_plan`, without groups and pins."""
    problem, planner = asked.problem, asked.planner
    if problem.sharding not in ("auto", "off"):
        return divided(asked)
    whole = replace(asked, problem=replace(problem, sharding="off"))
    if problem.sharding == "off" or planner != "search":
        return undivided(whole)
    judge = Judge(problem, problem.schedules, asked.score)
    first, refusal = None, None
    try:
        first = undivided(whole)
        judge.simulate(first)
        if asked.is_over():
            return first
    except Infeasible as error:
        refusal = error
    if one_stage := [name for name in problem.schedules if FAMILIES[name].is_planned]:
        alone = problem.under((one_stage[0],))
        for sharding in problem.shardings[1:]:
            dividing_plan(alone, judge.simulate, sharding)
    first_s = judge.simulate(first) if first else inf
    quick = QUICK if judge.leaders else planner
    # Where the bound is near there is little to gain. BERT-48 on 16 V100 gained nothing, and took
    # two thirds longer.
    if first is None or (
        gap(first_s, lower_bound(whole.problem).seconds) >= ALONE and is_short(whole.problem, first)
    ):
        for sharding in ("optimizer", "parameters"):
            with suppress(Infeasible, BadInput):
                part = replace(problem, sharding=sharding)
                judge.simulate(divided(replace(asked, problem=part, planner=quick)))
        seconds, best = judge.best_of(problem.schedules)
        if best and not asked.until:
            climb(judge, best, seconds, ACTIONS_FOR_MIXED)
            most = most_divided(best)
            if most and planner != quick and seconds * (1 + ALONE) < first_s:
                # What the pipeline lacks is memory: 70B on 64 H100 gained another twentieth.
                part = replace(problem, sharding=SHARDINGS[most])
                judge.simulate(divided(replace(asked, problem=part)))
    seconds, best = judge.best_of(problem.schedules)
    if best is None:
        raise refusal or infeasible(problem, planner)
    limit_s = seconds * (1 + problem.as_fast)
    if first and first_s <= limit_s:
        return first
    near = [plan for plan, its_s in judge.fastest(problem.schedules) if its_s <= limit_s]
    return replace(min(near, key=most_divided), planner=planner)


def most_divided(plan: Plan) -> int:
    """What the devices of any stage divide at most, as a place in `SHARDINGS`."""
    return max(SHARDINGS.index(stage.sharding) for stage in plan.stages)


def divided(asked: Question) -> Plan:
    """The plan of a planner in which the devices of every stage divide the same (`dividing`)."""
    problem = asked.problem

    def meant(plan: Plan) -> Plan:
        return with_sharding(plan, problem.sharding)

    return meant(undivided(stand_ins(asked, dividing(problem, problem.sharding), meant)))


def stand_ins(asked: Question, problem: PlanningProblem, meant: Callable[[Plan], Plan]) -> Question:
    """What is asked of plans of ``problem`` that stand for others: ``meant`` of them."""

    def score(plan: Plan) -> float:
        return score_of(meant(plan), asked.score)

    def shown(step: SearchStep) -> None:
        asked.tell(replace(step, plan=meant(step.plan) if step.plan else None))

    return replace(asked, problem=problem, score=score, on_step=shown)


def undivided(asked: Question) -> Plan:
    """The plan of a planner that says of no stage what its devices divide."""
    problem, planner, score = asked.problem, asked.planner, asked.score
    if problem.blocks == "always":
        return by_block(asked)
    found, refusal = list[Plan](), None
    try:
        found.append(kept_or_whole(asked))
    except Infeasible as error:
        refusal = error
    if not problem.allows_blocks or (found and not may_gain(problem, planner, found[0], score)):
        if refusal:
            raise refusal
        return found[0]
    if found and asked.is_over():
        return found[0]
    with suppress(Infeasible, BadInput):
        quick = found and planner == "search"
        found.append(by_block(replace(asked, planner=QUICK) if quick else asked))
    if not found:
        raise refusal or infeasible(problem, planner)
    judge = Judge(problem, problem.schedules, score)
    for plan in found:
        judge.simulate(plan)
        if FAMILIES[plan.schedule].is_planned:
            judge.simulate(with_needed_recompute(problem, plan))
    seconds, best = judge.best_of(problem.schedules)
    if planner == "search" and best and not asked.until:
        best, _ = climb(judge, best, seconds, ACTIONS_FOR_MIXED)
    return replace(best or found[0], planner=planner)


def may_gain(problem: PlanningProblem, planner: str, plan: Plan, score: Score) -> bool:
    """Whether plans that recompute by block may be faster than ``plan``.

    They can be if memory limits it, and if no bound shows that they take longer.
    """
    if planner not in ("search", *ONE_STAGE_PLANNERS):
        return False
    return is_short(problem, plan) and lower_bound(in_blocks(problem)).seconds < score(plan)


def is_short(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether a stage recomputes, or a device has less than `NEARLY_FULL` of its memory left."""
    if any(stage.recompute or stage.by_block for stage in plan.stages):
        return True
    prediction = predict_plan(problem, plan, with_timeline=False)
    peaks = zip(prediction.peak_memory_bytes, problem.cluster.devices, strict=True)
    return any(peak > NEARLY_FULL * device.memory_bytes for peak, device in peaks)


def by_block(asked: Question) -> Plan:
    """The plan of a planner in which all stages recompute by block (`in_blocks`)."""

    def meant(plan: Plan) -> Plan:
        return with_recompute(plan, False, by_block=True)

    return meant(kept_or_whole(stand_ins(asked, in_blocks(asked.problem), meant)))


def kept_or_whole(asked: Question) -> Plan:
    """The answer of a planner without recompute by block."""
    if asked.planner == "search":
        return searched_plan(asked)
    asked.tell(SearchStep(f"planner {asked.planner}", None, inf))
    if all(FAMILIES[name].is_planned for name in asked.problem.schedules):
        return PLANNERS[asked.planner](asked.problem, asked.limited(asked.score))
    return rescheduled_plan(asked)


def searched_plan(asked: Question) -> Plan:
    """What `search` answers, or its best plan at the deadline."""
    problem, best = asked.problem, None
    starts = dict(STARTING_PLANNERS)
    if problem.pins:
        from penstock.planners.pinned import pinned

        def of_any_schedule(_: PlanningProblem, score: Score) -> Plan:
            return pinned(problem, score)

        starts |= {"pinned": pinned, "pinned, any schedule": of_any_schedule}
    for step in search_steps(problem, asked.limited(asked.score), starts):
        best = step.plan
        asked.tell(step)
        if best is not None and asked.is_over():
            break
    if best is None:
        raise infeasible(problem, "search")
    return replace(best, planner="search")


def rescheduled_plan(asked: Question) -> Plan:
    """The best plan of a published planner, also under schedules that it does not know."""
    problem, score, make = asked.problem, asked.score, PLANNERS[asked.planner]
    known = tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    base = problem.under(known or PlanningProblem.schedules)
    found: list[Plan] = []
    try:
        first = make(base, asked.limited(score))
        # A plan of a schedule that is not allowed is never an answer, not even when time is up.
        found += [first] if known else []
    except Infeasible:
        wide = replace(base, cluster=with_boundless_memory(base.cluster))
        first = make(wide, asked.limited(make_score(wide)))
    in_time = asked.limited(score)
    for name in (name for name in problem.schedules if name not in known):
        best = min(found, key=score, default=None)
        asked.tell(SearchStep(f"schedule {name}", best, score(best) if best else inf))
        if best and asked.is_over():
            break
        plan = rescheduled(problem, first, name, in_time)
        if plan is None and asked.until and not found:
            # The deadline may have cut short the only schedule that fits.
            plan = rescheduled(problem, first, name, score)
        found += [plan] if plan else []
    if not found:
        raise infeasible(base, asked.planner)
    return min(found, key=score)


def score_until(score: Score, deadline_s: float, clock: Callable[[], float]) -> Score:
    """``score`` until the deadline; after it, infinite for plans that were not scored before.

    At least one plan that fits is scored, however long that takes.
    """
    known: dict[Plan, float] = {}
    found = False

    def limited(plan: Plan) -> float:
        nonlocal found
        if plan not in known:
            if found and clock() > deadline_s:
                return inf
            known[plan] = score(plan)
            found = found or known[plan] < inf
        return known[plan]

    return limited
