"""No plan and no order beats the bounds: every plan of small problems, and random orders."""

from math import inf
from random import Random

from bound_strategies import bound_problems, slow_link_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.every_plan import every_plan_at_all
from strategies import Case, cases

from penstock.costs.lower_bound import lower_bound, lower_bound_s, plan_bound_s
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.schedule.action import Action, ActionKind
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.validate import check_playable
from penstock.simulate.catalogue import workload_of
from penstock.simulate.compiled import play
from penstock.simulate.score import make_score

ROUNDING = 1e-9
KINDS: tuple[ActionKind, ...] = ("F", "B")


@settings(max_examples=40, deadline=None)
@given(problem=bound_problems())
def test_no_plan_of_a_small_problem_beats_its_bounds(problem: PlanningProblem):
    score, bound = make_score(problem), lower_bound(problem)
    assert bound.argument
    for plan in every_plan_at_all(problem):
        seconds = score(plan)
        if seconds < inf:
            assert bound.seconds <= seconds * (1 + ROUNDING), plan
            assert plan_bound_s(problem, plan) <= seconds * (1 + ROUNDING), plan


@settings(max_examples=60, deadline=None)
@given(problem=slow_link_problems())
def test_no_plan_beats_the_bound_where_links_are_slow(problem: PlanningProblem):
    score, bound_s = make_score(problem), lower_bound_s(problem)
    for plan in every_plan_at_all(problem):
        assert bound_s <= score(plan) * (1 + ROUNDING), plan


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_no_order_of_whole_backwards_beats_the_bounds(case: Case, seed: int):
    plan = case.plan
    schedule = any_order(plan, Random(seed))
    check_playable(schedule, plan.shape())
    workload = workload_of(plan, case.profile, case.cluster, schedule)
    seconds = play(workload).iteration_s
    problem = PlanningProblem(
        case.profile, case.cluster, plan.global_batch, (plan.micro_batch_size,)
    )
    assert lower_bound_s(problem) <= seconds * (1 + ROUNDING)
    assert plan_bound_s(problem, plan) <= seconds * (1 + ROUNDING)


def any_order(plan: Plan, random: Random) -> Schedule:
    """A random order of work without deadlock: what is ready goes next, whichever that is."""
    stages, batches = len(plan.stages), plan.micro_batches
    orders: list[list[Action]] = [[] for _ in range(stages)]
    done: set[Action] = set()
    waiting = [Action(kind, s, m) for kind in KINDS for s in range(stages) for m in range(batches)]
    while waiting:
        ready = [action for action in waiting if is_ready(action, stages, done)]
        action = random.choice(ready)
        waiting.remove(action)
        done.add(action)
        order = orders[action.stage]
        forward = Action("F", action.stage, action.micro_batch)
        if action.kind == "B" and plan.stages[action.stage].recompute and order[-1] != forward:
            order.append(Action("R", action.stage, action.micro_batch))
        order.append(action)
    return schedule_from_actions(orders)


def is_ready(action: Action, stages: int, done: set[Action]) -> bool:
    """Whether all that must precede an action is done."""
    stage, m = action.stage, action.micro_batch
    if action.kind == "F":
        return stage == 0 or Action("F", stage - 1, m) in done
    last = stage == stages - 1
    return Action("F", stage, m) in done and (last or Action("B", stage + 1, m) in done)
