"""The dynamic program against enumeration, and the simulator's memory."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from planning_strategies import problems
from reference.every_plan import every_plan

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.sharding import with_sharding
from penstock.costs.stage_costs import estimate_s, plan_peaks_bytes
from penstock.costs.tables import whole_chain
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.choice import Candidate
from penstock.planners.dynamic_program import dynamic_program, table_of
from penstock.planners.dynamic_program import plans_of_table as table_candidates
from penstock.planners.spp.partition import PartitionTable
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import predict_plan
from penstock.simulate.simulation import Prediction

ROUNDING = 1e-9
"""Prefix sums and sums over layers add in a different order."""


def table(problem: PlanningProblem, size: int, schedule: str) -> PartitionTable:
    costs = whole_chain(problem)
    return table_of(costs, tuple(range(len(problem.cluster.devices))), size, schedule)


def candidates(problem: PlanningProblem) -> list[tuple[str, int, Candidate]]:
    return [
        (schedule, size, candidate)
        for size in problem.micro_batch_sizes
        for schedule in problem.schedules
        for candidate in table_candidates(table(problem, size, schedule))
    ]


def fits(problem: PlanningProblem, plan: Plan) -> bool:
    return predicted(problem, plan).fits


def predicted(problem: PlanningProblem, plan: Plan) -> Prediction:
    """The simulator's prediction of a plan whose stages divide what the problem says."""
    return predict_plan(
        problem, with_sharding(plan, "" if problem.sharding == "off" else problem.sharding)
    )


def recompute_only_where_needed(problem: PlanningProblem, plan: Plan, fitting: set[Plan]) -> bool:
    """Whether no stage of an 'auto' plan recomputes that would fit without."""
    for index, stage in enumerate(plan.stages):
        if problem.recompute == "auto" and stage.recompute:
            kept = replace(stage, recompute=False)
            stages = (*plan.stages[:index], kept, *plan.stages[index + 1 :])
            if replace(plan, stages=stages) in fitting:
                return False
    return True


@settings(max_examples=60, deadline=None)
@given(problems(divided=True))
def test_the_table_finds_the_least_estimate_of_every_plan_that_fits(problem: PlanningProblem):
    order = tuple(range(len(problem.cluster.devices)))
    fitting = {plan for plan in every_plan(problem, order) if fits(problem, plan)}
    least: dict[tuple[str, int, int, int], float] = {}
    for plan in fitting:
        if recompute_only_where_needed(problem, plan, fitting):
            key = (plan.schedule, plan.micro_batch_size, len(plan.stages), plan.devices[0])
            least[key] = min(least.get(key, inf), estimate_s(problem, plan))
    found: dict[tuple[str, int, int, int], float] = {}
    for schedule, size, candidate in candidates(problem):
        assert candidate.plan in fitting
        assert candidate.estimate_s == pytest.approx(
            estimate_s(problem, candidate.plan), rel=ROUNDING
        )
        found[schedule, size, len(candidate.plan.stages), candidate.plan.devices[0]] = (
            candidate.estimate_s
        )
    assert found == pytest.approx(least, rel=ROUNDING)


@settings(max_examples=40, deadline=None)
@given(problems(divided=True))
def test_memory_by_the_planners_formula_is_the_simulators(problem: PlanningProblem):
    for _, _, candidate in candidates(problem):
        plan = candidate.plan
        prediction = predicted(problem, plan)
        expected = [prediction.peak_memory_bytes[device] for device in plan.devices]
        assert list(plan_peaks_bytes(problem, plan)) == pytest.approx(expected, rel=ROUNDING)


def layer(name: str, seconds: float, parameter_bytes: int) -> LayerCost:
    third = Affine(0.0, seconds / 3)
    return LayerCost(name, third, third, third, parameter_bytes, saved_bytes=Affine(0.0, 1.0))


def test_convolutions_get_more_replicas_than_the_dense_layers_they_feed():
    convolutions = [layer(f"conv{i}", 3e-3, 1_000_000) for i in range(8)]
    dense = [layer(f"dense{i}", 3e-4, 200_000_000) for i in range(3)]
    everything = (*convolutions, *dense)
    small = Affine(0.0, 1e5)
    edges = tuple(Edge(i, i + 1, f"t{i}", small, small) for i in range(len(everything) - 1))
    profile = ModelProfile("vgg-like", everything, edges, batch_size=32)
    host = Host("host", (Device("gpu", 1e12),) * 4, link_bytes_per_s=3e9)
    problem = PlanningProblem(profile, Cluster("four", (host,)), 256, (32,))
    plan = dynamic_program(problem, lambda plan: estimate_s(problem, plan))
    first, last = plan.stages
    assert (first.replicas, last.replicas) == (3, 1)
    assert first.layers.stop in (7, 8)


def test_a_faster_device_gets_rows_in_proportion():
    profile = ModelProfile("one", (layer("only", 1.0, 0),), batch_size=8)
    devices = (Device("fast", 1e9, speed=3.0), Device("slow", 1e9))
    cluster = Cluster("two", (Host("host", devices, link_bytes_per_s=1e9),))
    problem = PlanningProblem(profile, cluster, 8, (8,))
    plan = dynamic_program(problem, lambda plan: estimate_s(problem, plan))
    assert plan.stages[0].slices == (6, 2)


def test_a_slow_device_stays_idle_where_it_would_only_hold_up_the_others():
    profile = ModelProfile("one", (layer("only", 1.0, 1000),), batch_size=8)
    devices = (Device("fast", 1e9), Device("slow", 1e9, speed=0.01), Device("fast", 1e9))
    cluster = Cluster("three", (Host("host", devices, link_bytes_per_s=1e9),))
    problem = PlanningProblem(profile, cluster, 4, (4,))
    plan = dynamic_program(problem, lambda plan: estimate_s(problem, plan))
    assert plan.devices == (0, 2)


def test_recompute_is_chosen_only_where_a_stage_does_not_fit_without():
    big, small = Affine(0.0, 10.0), Affine(0.0, 1.0)
    layers = tuple(
        LayerCost(f"l{i}", Affine(0, 1), Affine(0, 1), Affine(0, 1), saved_bytes=big)
        for i in range(2)
    )
    profile = ModelProfile("deep", layers, (Edge(0, 1, "t", small, small),), batch_size=1)
    cluster = Cluster("two", (Host("host", (Device("d", 15.0),) * 2, link_bytes_per_s=1e9),))
    problem = PlanningProblem(profile, cluster, 8, (1,), schedules=("1f1b",))
    plan = dynamic_program(problem, lambda plan: estimate_s(problem, plan))
    assert [stage.recompute for stage in plan.stages] == [True, False]


def test_what_does_not_fit_is_explained_with_the_smallest_thing_that_would_do():
    layers = tuple(
        LayerCost(f"l{i}", Affine(0, 1), Affine(0, 1), Affine(0, 1), 4_000_000_000)
        for i in range(4)
    )
    profile = ModelProfile("heavy", layers, batch_size=1)
    devices = (Device("V100-16GB", 16e9),) * 4
    cluster = Cluster("four", (Host("host", devices, link_bytes_per_s=1e9),))
    problem = PlanningProblem(profile, cluster, 8, (1,), max_stages=2)
    with pytest.raises(Infeasible) as caught:
        dynamic_program(problem, lambda plan: estimate_s(problem, plan))
    message = str(caught.value)
    assert "stage 0 needs 32 GB" in message or "stage 1 needs 32 GB" in message
    assert "V100-16GB has 16 GB" in message
    assert "use >= 4 stages" in message
    assert "\n" not in message
