"""Long chains are cut at few places."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from planning_strategies import problems

from penstock.cluster.toml_file import find_cluster
from penstock.plan.problem import PlanningProblem
from penstock.planners.choice import Candidate
from penstock.planners.coarse_chain import likely_cuts
from penstock.planners.dapple import dapple
from penstock.planners.pipedream import pipedream
from penstock.profile.model_profile import Affine, Edge, ModelProfile


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


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_plans_of_long_chains_have_such_cuts_only(problem: PlanningProblem) -> None:
    layers, cuts = len(problem.profile.layers), likely_cuts(problem, 2)
    found: list[Candidate] = []
    with pytest.MonkeyPatch.context() as patched:
        for planner, candidates in (
            (dapple, dapple.dapple_candidates),
            (pipedream, pipedream.pipedream_candidates),
        ):
            patched.setattr(planner, "MOST_LAYERS", 2)
            found += candidates(problem)
    for candidate in found:
        stops = [stage.layers.stop for stage in candidate.plan.stages]
        assert stops[-1] == layers and set(stops) <= set(cuts)
