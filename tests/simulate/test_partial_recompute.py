"""Stages that recompute some of their layers: bytes and seconds, and both engines agree."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.plain_simulator import play
from strategies import Case, cases

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.plan.json_file import plan_from_json, plan_to_json
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate import compiled
from penstock.simulate.catalogue import workload_of
from penstock.simulate.simulation import simulate_plan

SAVED = (10.0, 20.0, 40.0, 80.0)
FORWARD_S = (1.0, 2.0, 4.0, 8.0)
TENSOR = 3.0
MICRO_BATCHES = 4


def model() -> ModelProfile:
    """Four layers in a chain whose costs are told apart by their sums."""
    layers = tuple(
        LayerCost(f"layer {i}", Affine(f), Affine(1.0), Affine(1.0), saved_bytes=Affine(s))
        for i, (f, s) in enumerate(zip(FORWARD_S, SAVED, strict=True))
    )
    size = Affine(TENSOR)
    return ModelProfile("m", layers, tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(3)))


def plan(again: tuple[int, ...], recompute: bool = True) -> Plan:
    """All four layers on one device, so that each micro-batch is held by GPipe."""
    return Plan((Stage(range(4), (0,), (1,), recompute, again),), MICRO_BATCHES, 1, "gpipe")


def simulated(made: Plan) -> tuple[float, float]:
    """Seconds of the iteration, and the peak in bytes."""
    one = Cluster("c", (Host("h", (Device("d", 1e9),), inf),))
    prediction = simulate_plan(made, model(), one)
    return prediction.iteration_s, prediction.peak_memory_bytes[0]


@pytest.mark.parametrize(
    ("again", "kept_bytes"),
    [
        # What the other layers save, and the tensors between those that keep and those that do not.
        ((0,), 20 + 40 + 80 + TENSOR),
        ((3,), 10 + 20 + 40 + TENSOR),
        ((1, 2), 10 + 80 + 2 * TENSOR),
        ((0, 2), 20 + 80 + 3 * TENSOR),
        ((0, 1, 2, 3), 0.0),
    ],
)
def test_bytes_and_seconds_are_those_of_the_layers_named(
    again: tuple[int, ...], kept_bytes: float
) -> None:
    forward_s, backward_s = sum(FORWARD_S), 8.0
    again_s = sum(FORWARD_S[layer] for layer in again)
    # Micro-batch 0 goes back first, after the forward of the last: all are made again.
    found_s, found_bytes = simulated(plan(again))
    assert found_s == pytest.approx(MICRO_BATCHES * (forward_s + backward_s + again_s))
    held = (MICRO_BATCHES - 1) * kept_bytes + sum(SAVED)
    assert found_bytes == pytest.approx(max(held, MICRO_BATCHES * kept_bytes))


def test_all_layers_named_is_full_recompute() -> None:
    assert simulated(plan((0, 1, 2, 3))) == simulated(plan(()))


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_engines_agree_on_plans_that_recompute_some_layers(case: Case, data: st.DataObject) -> None:
    stages = tuple(
        replace(
            stage,
            recompute=True,
            recompute_layers=tuple(sorted(data.draw(st.sets(st.sampled_from(list(stage.layers)))))),
        )
        for stage in case.plan.stages
    )
    made = replace(case.plan, stages=stages)
    workload = workload_of(made, case.profile, case.cluster, order_of(made))
    trace = play(workload)
    np.testing.assert_allclose(compiled.play(workload).actions, trace.actions, 1e-9, 1e-9)
    found_s = compiled.iteration_s(workload.parts, compiled.orders_of(workload))
    assert found_s == pytest.approx(trace.iteration_s)


def test_a_plan_file_names_single_layers() -> None:
    made = plan((1, 2))
    written = plan_to_json(made)
    assert written["stages"][0]["recompute"] == [1, 2]  # type: ignore[index,call-overload]
    assert plan_from_json(written, "plan.json") == made
    for wrong in ([4], [2, 1], [1, 1]):
        written["stages"][0]["recompute"] = wrong  # type: ignore[index,call-overload]
        with pytest.raises(BadInput, match=r"stage 0 recomputes layers \[.*name layers of its own"):
            plan_from_json(written, "plan.json")


def test_layers_are_named_only_where_a_stage_recomputes() -> None:
    assert replace(plan((1,)).stages[0], recompute=False).recompute_layers == ()
