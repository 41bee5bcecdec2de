"""Stages whose devices divide state or parameters: bytes and seconds by hand, refusals, bounds."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, cases

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.collectives import all_reduce_s
from penstock.cluster.toml_file import find_cluster
from penstock.core.native import gathered_pass_s
from penstock.costs.lower_bound import plan_bound_s
from penstock.costs.sharding import with_sharding
from penstock.errors import BadInput
from penstock.plan.plan import SHARDINGS, Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import find_plan
from penstock.profile.find import find_profile
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
)
from penstock.simulate.score import make_score
from penstock.simulate.simulation import Prediction, simulate_plan

DEVICES, PARAMETERS = 4, 8_000_000


def model() -> ModelProfile:
    """Three equal layers, a second of forward and two of backward for a row."""
    layer = LayerCost(
        "layer",
        *(Affine(0.0, 1.0),) * 3,
        parameter_bytes=PARAMETERS,
        saved_bytes=Affine(0.0, 20e6),
        workspace_bytes=Affine(0.0, 1e6),
    )
    size = Affine(0.0, 3e6)
    edges = tuple(Edge(i, i + 1, f"x{i}", size, size) for i in range(2))
    return ModelProfile("three", (layer,) * 3, edges, step_s_per_byte=1e-8)


def cluster_of(link_bytes_per_s: float) -> Cluster:
    return Cluster("c", (Host("h", (Device("gpu", 1e9),) * DEVICES, link_bytes_per_s),))


def predicted(
    sharding: str, link_bytes_per_s: float, *, by_block: bool = False, micro_batches: int = 1
) -> Prediction:
    """One stage on four devices, a row on each."""
    stage = Stage(range(3), (0, 1, 2, 3), (1,) * 4, by_block=by_block, sharding=sharding)
    plan = Plan((stage,), micro_batches, 4, "1f1b")
    return simulate_plan(plan, model(), cluster_of(link_bytes_per_s))


def test_state_is_divided_by_the_replicas_of_each_stage() -> None:
    profile = find_profile("bert-48")
    cluster = find_cluster("dapple-a")
    last = len(profile.layers)
    stages = (Stage(range(6), (0, 1, 2), (2, 1, 1)), Stage(range(6, last), (3,), (4,)))
    plan = Plan(stages, 4, 4, "1f1b")
    whole = simulate_plan(plan, profile, cluster)
    divided = simulate_plan(with_sharding(plan, "optimizer"), profile, cluster)
    assert divided.iteration_s == whole.iteration_s
    pairs = zip(whole.peak_memory_bytes, divided.peak_memory_bytes, strict=True)
    saved = [before - after for before, after in pairs]
    moments = 2.0 * profile.parameter_bytes(range(6))
    assert [round(bytes) for bytes in saved] == [round(moments * 2 / 3)] * 3 + [0] * (
        len(saved) - 3
    )


def test_a_device_holds_its_share_two_whole_layers_with_gradients_and_activations() -> None:
    # Parameters, gradients and two moments of 24 MB; where all are divided, four times 8 MB whole.
    whole, activations = 3 * PARAMETERS, 60e6 + 1e6
    # By block: two tensors between layers, and what the first layer saves.
    again = 6e6 + 20e6 + 1e6
    for sharding, held in (
        ("", 4 * whole),
        ("optimizer", 2 * whole + 2 * whole / DEVICES),
        ("parameters", 4 * whole / DEVICES + 4 * PARAMETERS),
    ):
        kept, by_block = (predicted(sharding, 1e9, by_block=way) for way in (False, True))
        assert kept.peak_memory_bytes == pytest.approx([held + activations] * DEVICES)
        assert by_block.peak_memory_bytes == pytest.approx([held + again] * DEVICES)


def test_messages_pass_behind_computing_except_for_the_first_and_the_last() -> None:
    half_s = all_reduce_s(cluster_of(1e8), range(DEVICES), PARAMETERS) / 2
    step_s = 1e-8 * 3 * PARAMETERS / DEVICES
    # The first gathers of forward and backward, and the last scatter; all others are shorter than
    # what a layer computes.
    assert half_s < 0.5
    for micro_batches in (1, 3):
        found = predicted("parameters", 1e8, micro_batches=micro_batches)
        expected_s = micro_batches * (9.0 + 3 * half_s) + step_s
        assert found.iteration_s == pytest.approx(expected_s)
    again = predicted("parameters", 1e8, by_block=True)
    assert again.iteration_s == pytest.approx(12.0 + 3 * half_s + step_s)


def test_where_links_are_slow_they_take_the_time() -> None:
    half_s = all_reduce_s(cluster_of(1e6), range(DEVICES), PARAMETERS) / 2
    found = predicted("parameters", 1e6).iteration_s
    # Three gathers, three more in the backward, three scatters; and what computes beside none.
    assert 9 * half_s < found < 9 * half_s + 9.0
    assert predicted("parameters", inf).iteration_s == pytest.approx(9.0, rel=0.01)


SECONDS = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(SECONDS, SECONDS, st.booleans())
def test_neither_computing_nor_messages_are_faster_than_alone(
    messages_s: list[float], work_s: list[float], scatters: bool
) -> None:
    count = min(len(messages_s), len(work_s))
    gathers_s, works_s = messages_s[:count], work_s[:count]
    found = gathered_pass_s(gathers_s, works_s, scatters)
    sent_s, computing_s = sum(gathers_s) * (2 if scatters else 1), sum(works_s)
    assert max(computing_s, sent_s) - 1e-9 <= found <= computing_s + sent_s + 1e-9


@pytest.mark.parametrize(
    ("schedule", "why"),
    [("zb-h1", "splits backwards"), ("pipedream", "has no flush"), ("chimera", "twice")],
)
def test_schedules_that_cannot_are_refused_with_the_reason(schedule: str, why: str) -> None:
    stages = (Stage(range(1), (0, 1), (2, 2)), Stage(range(1, 3), (2, 3), (2, 2)))
    plan = Plan(stages, 2, 4, schedule)
    divided = with_sharding(plan, "parameters")
    with pytest.raises(BadInput, match=f"stage 0 divides its parameters.*{why}.*'1f1b'"):
        simulate_plan(divided, model(), cluster_of(1e9))
    if schedule != "pipedream":
        simulate_plan(with_sharding(plan, "optimizer"), model(), cluster_of(1e9))


def test_parameters_that_stages_share_are_not_divided() -> None:
    tied = replace(model(), shared=(SharedParameter("tied", 1_000_000, (0, 2)),))
    stages = (Stage(range(1), (0, 1), (2, 2)), Stage(range(1, 3), (2, 3), (2, 2)))
    divided = with_sharding(Plan(stages, 2, 4, "1f1b"), "parameters")
    with pytest.raises(BadInput, match=r"stages \[0, 1\] share parameter 'tied'.*tied between"):
        simulate_plan(divided, tied, cluster_of(1e9))
    alone = Plan((Stage(range(3), (0, 1), (2, 2), sharding="parameters"),), 2, 4, "1f1b")
    assert simulate_plan(alone, tied, cluster_of(1e9)).fits
    problem = PlanningProblem(tied, cluster_of(1e9), 4, (2, 4), sharding="parameters")
    plan = find_plan(problem, "search", make_score(problem))
    assert all(len(stage.layers) == 3 for stage in plan.stages if stage.sharding)


def untied(case: Case) -> Case:
    return replace(case, profile=replace(case.profile, shared=()))


@settings(max_examples=60, deadline=None)
@given(cases(), st.lists(st.sampled_from(SHARDINGS), min_size=4, max_size=4))
def test_no_plan_is_faster_than_its_bound(case: Case, kinds: list[str]) -> None:
    pairs = zip(case.plan.stages, kinds, strict=False)
    stages = tuple(replace(stage, sharding=kind) for stage, kind in pairs)
    case, plan = untied(case), replace(case.plan, stages=stages)
    sizes = (plan.micro_batch_size,)
    problem = PlanningProblem(case.profile, case.cluster, plan.global_batch, sizes)
    played_s = simulate_plan(plan, case.profile, case.cluster).iteration_s
    assert plan_bound_s(problem, plan) <= played_s * (1 + 1e-9)
