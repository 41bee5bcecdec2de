"""Stages that recompute by block: bytes and seconds, both engines, and where they are refused."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from reference.plain_simulator import play
from reference.same_spans import assert_engine_plays
from strategies import Case, cases

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.leanest import leanest
from penstock.costs.stage_costs import plan_peaks_bytes
from penstock.costs.tables import whole_chain
from penstock.errors import BadInput
from penstock.plan.json_file import plan_from_json, plan_to_json
from penstock.plan.ordering import order_of
from penstock.plan.plan import SHARDINGS, Plan, Stage, with_recompute
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.runtime.micro_batches import check_runnable
from penstock.simulate.catalogue import workload_of
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

SAVED = (10.0, 20.0, 80.0, 40.0)
FORWARD_S = (1.0, 2.0, 4.0, 8.0)
TENSOR, WORKSPACE, MICRO_BATCHES = 3.0, 5.0, 4


def model() -> ModelProfile:
    """Four layers in a chain whose costs are told apart by their sums."""
    layers = tuple(
        LayerCost(
            f"layer {i}",
            Affine(seconds),
            Affine(1.0),
            Affine(1.0),
            saved_bytes=Affine(saved),
            workspace_bytes=Affine(WORKSPACE),
        )
        for i, (seconds, saved) in enumerate(zip(FORWARD_S, SAVED, strict=True))
    )
    size = Affine(TENSOR)
    return ModelProfile("m", layers, tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(3)))


ALONE = Plan((Stage(range(4), (0,), (1,), by_block=True),), MICRO_BATCHES, 1, "gpipe")


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", MICRO_BATCHES), ("1f1b", 1)])
def test_layers_keep_what_they_read_and_one_at_a_time_has_its_activations(
    schedule: str, in_flight: int
) -> None:
    one = Cluster("c", (Host("h", (Device("d", 1e9),), inf),))
    prediction = simulate_plan(replace(ALONE, schedule=schedule), model(), one)
    # The backward of each layer begins with its forward, also with one micro-batch in flight.
    assert prediction.iteration_s == pytest.approx(MICRO_BATCHES * (2 * sum(FORWARD_S) + 8.0))
    # Layer 2 saves most; what it reads is kept already.
    largest = SAVED[2] - TENSOR + WORKSPACE
    assert prediction.peak_memory_bytes[0] == pytest.approx(in_flight * 3 * TENSOR + largest)


def test_each_reader_of_a_tensor_counts_it() -> None:
    profile = model()
    whole = replace(profile, edges=(*profile.edges, Edge(0, 3, "t0", Affine(7.0), Affine(7.0))))
    assert sum(layer.saved_bytes.at(1) for layer in whole.by_block.layers) == 3 * TENSOR + 7.0


WAYS = st.tuples(st.booleans(), st.sampled_from(SHARDINGS))


@settings(max_examples=80, deadline=None)
@given(cases(), st.lists(WAYS, min_size=4, max_size=4))
def test_engines_agree_on_plans_that_recompute_by_block_and_divide(
    case: Case, ways: list[tuple[bool, str]]
) -> None:
    pairs = zip(case.plan.stages, ways, strict=False)
    stages = tuple(replace(stage, by_block=way[0], sharding=way[1]) for stage, way in pairs)
    made = replace(case.plan, stages=stages)
    workload = workload_of(made, case.profile, case.cluster, order_of(made))
    assert_engine_plays(workload, play(workload))


@pytest.mark.parametrize(
    ("schedule", "why"), [("zb-h1", "splits backwards"), ("pipedream", "has no flush")]
)
def test_schedules_that_cannot_are_refused_with_the_reason(schedule: str, why: str) -> None:
    plan = replace(ALONE, schedule=schedule)
    one = Cluster("c", (Host("h", (Device("d", 1e9),), inf),))
    for refused in (lambda: simulate_plan(plan, model(), one), lambda: check_runnable(plan)):
        with pytest.raises(BadInput, match=f"stage 0 recomputes by block.*{why}.*'1f1b'"):
            refused()


def test_a_plan_file_says_so() -> None:
    written = plan_to_json(ALONE)
    assert written["stages"][0]["recompute"] == "blocks"  # type: ignore[index,call-overload]
    assert plan_from_json(written, "plan.json") == ALONE
    assert replace(ALONE.stages[0], recompute=True).by_block is False
    assert with_recompute(ALONE, False).stages[0].by_block is False


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_leanest_plan_fits_and_planners_count_its_bytes_as_the_simulator_does(
    problem: PlanningProblem,
) -> None:
    free = replace(problem, blocks="allowed")
    plan, kept = leanest(free, whole_chain(free)), leanest(problem, whole_chain(problem))
    assert plan is not None or kept is None
    if plan is None:
        return
    assert kept is None or len(plan.stages) <= len(kept.stages)
    assert make_score(free)(plan) < inf
    prediction = simulate_plan(
        plan,
        free.profile,
        free.cluster,
        optimizer_bytes_per_parameter_byte=free.optimizer_bytes_per_parameter_byte,
    )
    found = [prediction.peak_memory_bytes[device] for device in plan.devices]
    assert found == pytest.approx(plan_peaks_bytes(free, plan))
