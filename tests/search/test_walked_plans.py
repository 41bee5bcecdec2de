"""What is tried of the plans of walks: depths, recompute, split backwards, searched orders."""

from dataclasses import replace
from math import inf

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planning.planning_problem import schedules_named
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.search.even_loads import KINDS, WalkedPlan, least_loaded
from penstock.search.families import climbers
from penstock.search.search import simulate_other_orders
from penstock.search.simulated_plans import SimulatedPlans
from penstock.search.walked_plans import quick_s, simulate_walked
from penstock.simulate.score import make_score

SAVED, STATE = 100.0, 40.0
"""Bytes that a layer saves of a micro-batch, and those of its parameters, gradients and state."""


def problem(memory_bytes: float = inf, messages: float = 1.0) -> PlanningProblem:
    """Four equal layers for two devices; a layer keeps its input, or ten times as much."""
    one = Affine(0.0, 1.0)
    layer = LayerCost("layer", one, one, one, 10, saved_bytes=Affine(0.0, SAVED))
    size = Affine(0.0, messages)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(3))
    host = Host("host", (Device("device", memory_bytes),) * 2, link_bytes_per_s=10.0)
    profile, cluster = ModelProfile("four", (layer,) * 4, edges), Cluster("two", (host,))
    return PlanningProblem(profile, cluster, 8, (1,))


def plan_of(*widths: int) -> Plan:
    """Stages of so many layers, a device each."""
    ends = [sum(widths[:s]) for s in range(len(widths) + 1)]
    stages = [Stage(range(ends[s], ends[s + 1]), (s,), (1,)) for s in range(len(widths))]
    return Plan(tuple(stages), 8, 1, "1f1b", planner="search")


def quick(asked: PlanningProblem, plan: Plan, split: tuple[str, ...] = ()) -> float:
    score = make_score(replace(asked, schedules=(*asked.schedules, *split)))
    simulated = SimulatedPlans(replace(asked, schedules=(*asked.schedules, *split)), score)
    own = SimulatedPlans(asked, score, simulated.seconds)
    return quick_s(own, simulated, plan, split)


def test_a_plan_without_room_for_depth_is_tried_shallow_and_with_recompute() -> None:
    plan, roomy = plan_of(2, 2), quick(problem(), plan_of(2, 2))
    # Room for two layers' state and so many micro-batches of both.
    rooms = [2 * STATE + 2 * SAVED * kept for kept in (2, 1)]
    shallow, recomputing = (quick(problem(room), plan) for room in rooms)
    score = make_score(problem(rooms[0]))
    assert shallow == score(replace(plan, schedule="early-backward", in_flight_limit=(2, 1)))
    assert roomy <= shallow < recomputing < inf


def test_a_plan_is_tried_under_a_schedule_with_split_backwards() -> None:
    assert quick(problem(), plan_of(2, 2), ("zb-h2",)) < quick(problem(), plan_of(2, 2))


def test_the_fastest_plan_of_a_walk_is_found_and_simulated_at_other_depths() -> None:
    asked = problem(messages=10.0)
    simulated = SimulatedPlans(asked, make_score(asked))
    plans = [plan_of(1, 3), plan_of(2, 2), plan_of(3, 1)]
    walked = [WalkedPlan(plan, KINDS[0], place) for place, plan in enumerate(plans)]
    simulate_walked(simulated, simulated, walked, (), 0)
    assert simulated.best is not None
    assert [len(stage.layers) for stage in simulated.best.stages] == [2, 2]
    tried = {plan.in_flight_limit for plan in simulated.seconds if len(plan.stages[0].layers) == 2}
    assert {(), (8, 4), (2, 1)} < tried


def test_of_plans_with_as_many_replicas_the_least_loaded_one_is_chosen() -> None:
    asked, even, uneven, whole = problem(), plan_of(2, 2), plan_of(1, 3), plan_of(4)
    assert least_loaded(asked, [uneven, whole, even], inf, 9) == [even, whole]
    assert least_loaded(asked, [uneven, whole, even], inf, 1) == [even]
    # One device computes 8 micro-batches of 4 layers, 3 s each.
    assert least_loaded(asked, [uneven, whole, even], 8 * 4 * 3.0, 9) == [even]


def test_climbs_start_from_the_fastest_and_from_different_plans_with_searched_orders() -> None:
    def listed(*widths: int) -> Plan:
        return replace(plan_of(*widths), schedule="list")

    plain = [replace(plan_of(2, 2), schedule=name) for name in ("1f1b", "gpipe", "zb-h1")]
    fast = list(zip((1.0, 1.1, 1.2), plain, strict=True))
    same, other = (2.0, listed(1, 3)), (2.1, listed(2, 2))
    alone, never = (3.0, listed(4)), (inf, replace(plan_of(4), schedule="zero-bubble"))
    chosen = climbers([never, alone, other, same, *fast])
    assert chosen == [*fast, same, alone]


@pytest.mark.parametrize("widths", [(2, 2), (1, 3)])
def test_the_best_plan_gets_every_order_that_is_searched_for(widths: tuple[int, ...]) -> None:
    asked = replace(problem(messages=10.0), schedules=schedules_named("1f1b,list,zero-bubble"))
    simulated = SimulatedPlans(asked, make_score(asked))
    plan = plan_of(*widths)
    before_s = simulated.simulate(plan)
    simulate_other_orders(simulated)
    assert simulated.best_s < before_s
    assert {one.schedule for one in simulated.seconds} == {"1f1b", "list", "zero-bubble"}
