"""Closed forms of the memory."""

from math import inf

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import simulate_plan

PARAMETERS, BUFFERS, SAVED, INPUT, WORKSPACE = 100, 7, 50.0, 5.0, 30.0


def model(layers: int) -> ModelProfile:
    """Equal layers whose sizes tell the terms apart."""
    layer = LayerCost(
        "layer",
        Affine(1.0),
        Affine(1.0),
        Affine(1.0),
        PARAMETERS,
        BUFFERS,
        Affine(0.0, SAVED),
        Affine(0.0, WORKSPACE),
    )
    size = Affine(0.0, INPUT)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(layers - 1))
    return ModelProfile("m", (layer,) * layers, edges)


def cluster(devices: int, memory_bytes: float = 1e9) -> Cluster:
    """Equal devices."""
    return Cluster("c", (Host("h", (Device("d", memory_bytes),) * devices, inf),))


def plan(stages: int, micro_batches: int, schedule: str, recompute: bool = False) -> Plan:
    """One layer and one device a stage."""
    made = tuple(Stage(range(s, s + 1), (s,), (1,), recompute) for s in range(stages))
    return Plan(made, micro_batches, 1, schedule)


def peaks(made: Plan, devices: int) -> tuple[float, ...]:
    """Predicted peaks."""
    return simulate_plan(made, model(len(made.stages)), cluster(devices)).peak_memory_bytes


STATE = PARAMETERS * 4 + BUFFERS


@pytest.mark.parametrize("micro_batches", [1, 2, 8, 32])
def test_gpipe_keeps_every_micro_batch_and_grows_with_their_number(micro_batches: int) -> None:
    expected = STATE + micro_batches * SAVED + WORKSPACE
    assert peaks(plan(3, micro_batches, "gpipe"), 3) == (expected,) * 3


@pytest.mark.parametrize("micro_batches", [4, 8, 64])
def test_one_f_one_b_does_not_grow_with_the_number_of_micro_batches(micro_batches: int) -> None:
    assert peaks(plan(4, micro_batches, "1f1b"), 4) == tuple(
        STATE + in_flight * SAVED + WORKSPACE for in_flight in (4, 3, 2, 1)
    )


def test_recompute_keeps_everything_for_one_micro_batch_and_inputs_for_the_others() -> None:
    found = peaks(plan(3, 8, "1f1b", recompute=True), 3)
    # Stage 0 reads the batch, which is there anyway; stage 2 runs B right after F.
    assert found == (
        STATE + SAVED + WORKSPACE,
        STATE + INPUT + SAVED + WORKSPACE,
        STATE + SAVED + WORKSPACE,
    )


def test_replicas_need_memory_for_their_own_rows_and_unused_devices_none() -> None:
    made = Plan((Stage(range(1), (0, 2), (1, 3)),), 2, 4, "gpipe")
    assert peaks(made, 4) == (
        STATE + 2 * SAVED + WORKSPACE,
        0.0,
        STATE + 6 * SAVED + 3 * WORKSPACE,
        0.0,
    )


def test_the_optimizer_factor_is_the_users() -> None:
    made = plan(1, 1, "1f1b")
    with_sgd = simulate_plan(
        made, model(1), cluster(1), optimizer_bytes_per_parameter_byte=0.0
    ).peak_memory_bytes[0]
    assert with_sgd == peaks(made, 1)[0] - 2 * PARAMETERS


def test_a_device_that_is_too_small_is_named_and_the_rest_still_predicted() -> None:
    made = plan(2, 8, "gpipe")
    tight = Cluster("c", (Host("h", (Device("d", 1e9), Device("small", 600.0)), inf),))
    prediction = simulate_plan(made, model(2), tight)
    assert not prediction.fits
    assert prediction.too_full == (1,)
    assert prediction.iteration_s == 9 * 3.0
    assert simulate_plan(plan(2, 8, "1f1b"), model(2), tight).fits
