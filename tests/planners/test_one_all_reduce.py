"""An all-reduce is counted in one place: where the core doubles it, everything moves.

Except the formulas of published planners, which are those of their papers (PipeDream, Piper).
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from point_loads import load_of

from penstock.advice.assessment import assess_plan, baselines_of
from penstock.advice.explain import explain_plan
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.collectives import all_reduce_s
from penstock.core import native
from penstock.costs.lower_bound import plan_bound_s
from penstock.costs.sharding import with_sharding
from penstock.costs.stage_costs import estimate_s, stage_seconds
from penstock.costs.tables import search_costs, whole_chain
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import find_plan
from penstock.planners.spp.bound import spp_bound_s
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

DEVICES = (0, 1, 2, 3)
PLAN = Plan((Stage(range(4), DEVICES, (1, 1, 1, 1)),), 2, 4, "1f1b")


def problem(sum_step_s: float = 0.0) -> PlanningProblem:
    """Four layers on four devices, between which gradients pass for longer than layers compute."""
    cost, size = Affine(0.0, 1e-3), Affine(0.0, 1e3)
    layer = LayerCost("layer", cost, cost, cost, 10_000_000)
    edges = tuple(Edge(i, i + 1, f"x{i}", size, size) for i in range(3))
    profile = ModelProfile("four", (layer,) * 4, edges, batch_size=8, host_step_s_per_byte=1e-9)
    hosts = (Host("h", (Device("gpu", inf),) * 4, 1e9),)
    cluster = Cluster("c", hosts, sum_step_s=sum_step_s)
    return PlanningProblem(profile, cluster, 8, (4, 8))


def normed(asked: PlanningProblem) -> PlanningProblem:
    """The same, with a batch normalisation in each layer."""
    layers = tuple(replace(each, norms=1, norm_channels=1_000_000) for each in asked.profile.layers)
    return replace(asked, profile=replace(asked.profile, layers=layers))


def seconds(sum_step_s: float = 0.0) -> dict[str, float]:
    """What each part of the package says of one problem, asked anew."""
    asked = problem(sum_step_s)
    score, stage, chain = make_score(asked), PLAN.stages[0], whole_chain(asked)
    costs = chain.costs([DEVICES], [stage.slices])
    walks = search_costs(asked)
    baselines = baselines_of(asked, score)
    planned = assess_plan(PLAN, asked, baselines)
    summed = explain_plan(planned, asked).all_reduce
    assert summed is not None
    found = {
        "collectives": all_reduce_s(asked.cluster, DEVICES, 40e6),
        "batch norm": stage_seconds(normed(asked), stage).forward_s,
        "engine": score(PLAN),
        "FSDP": score(with_sharding(PLAN, "parameters")),
        "stage": stage_seconds(asked, stage).after_s,
        "estimate": estimate_s(asked, PLAN),
        "core, planners": costs.after_s(0, 0, 4),
        "core, walks": native.stage_cost(walks, DEVICES, 0, 4, 4, 2).after_s,
        "load": load_of(asked, PLAN),
        "bound of a plan": plan_bound_s(asked, PLAN),
        "SPP's bound": spp_bound_s(asked, PLAN),
        "explanation": summed.seconds,
        "answer": planned.prediction.iteration_s,
    }
    whole = replace(asked, max_stages=1)
    for name in ("data-parallel", "dapple", "spp", "dynamic-program"):
        found[name] = score(find_plan(whole, name, score))
    # A naive split has one copy of each layer, so it sums nothing.
    rivals = [one for one in baselines.rivals if not one.name.startswith("naive split")]
    return found | {rival.name: rival.iteration_s for rival in rivals}


def test_steps_that_take_longer_do_so_everywhere() -> None:
    once, longer = seconds(), seconds(sum_step_s=0.01)
    assert not [name for name in once if not longer[name] > once[name] * (1 + 1e-6)]
    for name in ("collectives", "core, planners"):
        assert longer[name] - once[name] == pytest.approx(2 * 3 * 0.01)
    more_s = longer["engine"] - once["engine"]
    assert longer["core, walks"] - once["core, walks"] == pytest.approx(more_s)


@pytest.fixture
def doubled() -> Iterator[None]:
    native.multiply_all_reduces(2.0)
    yield
    native.multiply_all_reduces(1.0)


def test_all_reduces_that_take_twice_as_long_do_so_everywhere(doubled: None) -> None:
    twice = seconds()
    native.multiply_all_reduces(1.0)
    once = seconds()
    unmoved = [name for name in once if not twice[name] > once[name] * (1 + 1e-6)]
    assert not unmoved
    summed = ("collectives", "stage", "core, planners", "explanation")
    assert [twice[name] for name in summed] == pytest.approx([2 * once[name] for name in summed])
    more_s = twice["engine"] - once["engine"]
    assert twice["core, walks"] - once["core, walks"] == pytest.approx(more_s)
    assert once["explanation"] * 0.5 < more_s <= once["explanation"] * (1 + 1e-9)
