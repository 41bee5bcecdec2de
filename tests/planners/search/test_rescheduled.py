"""Schedules that planners do not search over: what they make of a planner's devices."""

from dataclasses import replace
from math import inf

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem, synchronous_schedules
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

LAYERS, DEVICES, BATCH = 16, 4, 8


def problem_with(schedule: str, memory_bytes: float = inf) -> PlanningProblem:
    """Sixteen equal layers, four devices, messages that take little."""
    layer = LayerCost(
        "layer",
        Affine(0.0, 1.0),
        Affine(0.0, 1.0),
        Affine(0.0, 1.0),
        parameter_bytes=10,
        saved_bytes=Affine(0.0, 100.0),
    )
    size = Affine(0.0, 1.0)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(LAYERS - 1))
    profile = ModelProfile("equal layers", (layer,) * LAYERS, edges)
    devices = (Device("device", memory_bytes),) * DEVICES
    cluster = Cluster("four", (Host("host", devices, link_bytes_per_s=1e3),))
    return planning_problem(profile, cluster, BATCH, micro_batch_size=1, schedule=schedule)


def planned(schedule: str, memory_bytes: float = inf, planner: str = "gpipe") -> Plan:
    problem = problem_with(schedule, memory_bytes)
    return find_plan(problem, planner, make_score(problem))


def seconds(plan: Plan) -> float:
    problem = problem_with("1f1b")
    return simulate_plan(plan, problem.profile, problem.cluster).iteration_s


@pytest.mark.parametrize("schedule", synchronous_schedules())
def test_every_synchronous_schedule_gets_a_plan_of_its_own_placement(schedule: str) -> None:
    plan = planned(schedule)
    assert plan.schedule == schedule
    assert sorted(plan.devices) == list(range(DEVICES))
    rounds = len(plan.stages) // DEVICES
    style = FAMILIES[schedule].placement
    if style == "looped":
        assert plan.placement == tuple(range(DEVICES)) * rounds
    if style == "folded":
        assert plan.placement[:DEVICES] == plan.placement[DEVICES : 2 * DEVICES][::-1]


def test_split_backwards_and_several_stages_a_device_shorten_the_iteration() -> None:
    plain, split, folded = (seconds(planned(name)) for name in ("1f1b", "zb-h1", "zb-v"))
    assert folded < split < plain


def test_any_is_no_slower_than_each_schedule_alone() -> None:
    fastest = seconds(planned("any"))
    for name in ("1f1b", "zb-v", "zero-bubble", "interleaved"):
        assert fastest <= seconds(planned(name)) * (1 + 1e-9)


def test_lean_schedules_plan_where_planners_find_nothing_that_fits() -> None:
    held = simulate_plan_peak(planned("v-min"))
    tight = held * 1.01
    with pytest.raises(Infeasible):
        planned_without_recompute("1f1b", tight)
    assert planned_without_recompute("v-min", tight).schedule == "v-min"


def planned_without_recompute(schedule: str, memory_bytes: float) -> Plan:
    problem = replace(problem_with(schedule, memory_bytes), recompute="off")
    return find_plan(problem, "gpipe", make_score(problem))


def simulate_plan_peak(plan: Plan) -> float:
    problem = problem_with("1f1b")
    return max(simulate_plan(plan, problem.profile, problem.cluster).peak_memory_bytes)


def test_adaptive_schedules_remember_what_they_were_made_for() -> None:
    plan = planned("zero-bubble")
    assert len(plan.costs) == len(plan.stages)
    assert len(plan.memory_bytes) == DEVICES
    again = replace(plan, micro_batches=BATCH)
    assert again.shape() == plan.shape()
