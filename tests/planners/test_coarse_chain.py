"""Long chains made short keep their sums; plans for them are plans for the long ones."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from planning_strategies import problems

from penstock.cluster.toml_file import find_cluster
from penstock.costs.stage_costs import estimate_s, plan_peaks_bytes
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.choice import Candidate
from penstock.planners.coarse_chain import coarse_problem, expanded, likely_cuts
from penstock.profile.model_profile import Affine, Edge, ModelProfile, TensorParallelCosts


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_a_coarse_plan_costs_what_it_costs_in_the_long_chain(problem: PlanningProblem):
    coarse, cuts = coarse_problem(problem, 2)
    layers = len(coarse.profile.layers)
    # Each of the two parts of the work has at most one cut.
    assert len(cuts) == layers + 1 <= 4
    size = problem.micro_batch_sizes[0]
    stages = tuple(
        Stage(range(i, i + 1), (i,), (size,))
        for i in range(min(layers, len(problem.cluster.devices)))
    )
    stages = (*stages[:-1], Stage(range(len(stages) - 1, layers), stages[-1].devices, (size,)))
    plan = Plan(stages, problem.global_batch // size, size, problem.schedules[0])
    (wide,) = expanded(iter([Candidate(plan, 1.0)]), cuts)
    assert wide.plan.stages[-1].layers.stop == len(problem.profile.layers)
    assert estimate_s(coarse, plan) == pytest.approx(estimate_s(problem, wide.plan))
    coarse_peaks = plan_peaks_bytes(coarse, plan)
    for coarse_bytes, true_bytes in zip(
        coarse_peaks, plan_peaks_bytes(problem, wide.plan), strict=True
    ):
        # Only the workspace may be larger: of joined layers it is that of the hungriest each way.
        assert coarse_bytes >= true_bytes * (1 - 1e-9)


def test_a_long_chain_is_cut_where_little_crosses(small_profile: ModelProfile):
    layer = replace(small_profile.layers[0], name="layer")
    thin = {3, 7, 11}
    edges = tuple(
        Edge(i, i + 1, f"t{i}", Affine(0.0, 1.0 if i + 1 in thin else 9.0), Affine())
        for i in range(11)
    )
    profile = ModelProfile("chain", (layer,) * 12, edges)
    problem = PlanningProblem(profile, find_cluster("dapple-c"), 8, (8,))
    assert likely_cuts(problem, 3) == (0, 3, 7, 11, 12)
    assert likely_cuts(problem, 12) == tuple(range(13))


def test_a_coarse_chain_does_not_say_what_tensor_groups_divide(
    small_profile: ModelProfile,
):
    """That is known for each layer of the long chain."""
    layers = (small_profile.layers[0],) * 12
    divided = TensorParallelCosts((1.0,) * 12, (2.0,) * 12, (8.0,) * 12)
    profile = ModelProfile("chain", layers, tensor_parallel=divided)
    coarse, _ = coarse_problem(PlanningProblem(profile, find_cluster("dapple-c"), 8, (8,)), 3)
    assert len(coarse.profile.layers) < 12
    assert coarse.profile.tensor_parallel is None
