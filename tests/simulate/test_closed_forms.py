"""Iteration times that can be written down, against the simulator."""

from dataclasses import replace
from math import inf

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile, SharedParameter
from penstock.simulate.simulation import simulate_plan

FORWARD_S, BACKWARD_S = 1.0, 2.0
WORK_S = FORWARD_S + BACKWARD_S


def chain(stages: int, transfer_s: float = 0.0, step_s: float = 0.0) -> ModelProfile:
    """Equal layers; one byte a sample between neighbours, one parameter byte each."""
    layer = LayerCost("layer", Affine(FORWARD_S), Affine(1.0), Affine(BACKWARD_S - 1.0), 1)
    size = Affine(0.0, transfer_s)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(stages - 1))
    return ModelProfile("chain", (layer,) * stages, edges, step_s_per_byte=step_s)


def one_host(devices: int, rate: float = 1.0, slots: int = 0, speed: float = 1.0) -> Cluster:
    """Equal devices, ``rate`` bytes a second between any two."""
    device = Device("device", 1e9, speed)
    return Cluster("c", (Host("h", (device,) * devices, rate, full_speed_devices=slots),))


def straight(stages: int, micro_batches: int, schedule: str) -> Plan:
    """One device and one layer a stage."""
    made = tuple(Stage(range(s, s + 1), (s,), (1,)) for s in range(stages))
    return Plan(made, micro_batches, 1, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 17])
def test_balanced_stages_with_free_messages_have_the_bubble_of_the_formula(
    schedule: str, stages: int, micro_batches: int
) -> None:
    plan = straight(stages, micro_batches, schedule)
    prediction = simulate_plan(plan, chain(stages), one_host(stages))
    assert prediction.iteration_s == (micro_batches + stages - 1) * WORK_S
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert prediction.bubble == pytest.approx(bubble, abs=1e-12)


@pytest.mark.parametrize("speed", [0.5, 1.0, 4.0])
def test_a_faster_device_divides_every_compute_time(speed: float) -> None:
    profile = chain(1, step_s=0.6)
    prediction = simulate_plan(straight(1, 5, "1f1b"), profile, one_host(1, speed=speed))
    assert prediction.iteration_s == pytest.approx((5 * WORK_S + 0.6) / speed)


def test_replicas_reduce_their_gradients_by_the_ring_formula_and_then_step() -> None:
    layer = LayerCost("layer", Affine(0.0, 1.0), Affine(0.0, 1.0), Affine(0.0, 1.0), 400)
    profile = ModelProfile("m", (layer,), step_s_per_byte=0.001)
    plan = Plan((Stage(range(1), (0, 1, 2, 3), (2, 2, 2, 2)),), 3, 8, "1f1b")
    prediction = simulate_plan(plan, profile, one_host(4, rate=100.0))
    all_reduce_s = 2 * 3 / 4 * 400 / 100
    assert prediction.iteration_s == pytest.approx(3 * 2 * 3.0 + all_reduce_s + 0.4)


def test_all_reduce_of_early_buckets_overlaps_the_rest_of_the_last_backward() -> None:
    """Three layers of a bucket each: two all-reduces hide behind the backward of other layers."""
    layer = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0), 25 << 20)
    profile = ModelProfile("m", (layer,) * 3)
    plan = Plan((Stage(range(3), (0, 1), (1, 1)),), 1, 2, "1f1b")
    bucket_s = 1.5
    cluster = one_host(2, rate=(25 << 20) / bucket_s)
    prediction = simulate_plan(plan, profile, cluster)
    assert prediction.iteration_s == pytest.approx(3 * 1.0 + 3 * 2.0 + bucket_s)


def test_tied_parameters_are_reduced_between_their_stages() -> None:
    base = chain(2)
    tied = ModelProfile("m", base.layers, base.edges, (SharedParameter("embedding", 1000, (0, 1)),))
    cluster = one_host(2, rate=100.0)
    with_tie = simulate_plan(straight(2, 4, "1f1b"), tied, cluster).iteration_s
    without = simulate_plan(straight(2, 4, "1f1b"), base, cluster).iteration_s
    assert with_tie - without == pytest.approx(2 * 1 / 2 * 1000 / 100)


@pytest.mark.parametrize("slots, factor", [(0, 1.0), (4, 1.0), (3, 4 / 3), (2, 2.0), (1, 4.0)])
def test_workers_that_share_too_few_cores_slow_one_another_in_proportion(
    slots: int, factor: float
) -> None:
    plan = Plan((Stage(range(1), (0, 1, 2, 3), (1, 1, 1, 1)),), 6, 4, "1f1b")
    prediction = simulate_plan(plan, chain(1), one_host(4, inf, slots))
    assert prediction.iteration_s == pytest.approx(6 * WORK_S * factor)


def test_a_worker_gains_speed_when_another_on_its_core_has_ended() -> None:
    """Work of 3 s and 9 s on one core: the first ends at 6 s, the second at 12 s."""
    layer = LayerCost("layer", Affine(0.0, 3.0), Affine(), Affine())
    plan = Plan((Stage(range(1), (0, 1), (1, 3)),), 1, 4, "1f1b")
    timeline = simulate_plan(plan, ModelProfile("m", (layer,)), one_host(2, inf, 1)).timeline
    ends = {event.device: event.end_s for event in timeline.events if event.kind == "F"}
    assert ends == pytest.approx({0: 6.0, 1: 12.0})


def test_stages_that_alternate_on_one_core_lose_nothing() -> None:
    """One micro-batch through four stages on one core: never two of them compute."""
    plan = straight(4, 1, "1f1b")
    prediction = simulate_plan(plan, chain(4), one_host(4, inf, slots=1))
    assert prediction.iteration_s == pytest.approx(4 * WORK_S)


def two_hosts(port: float) -> Cluster:
    """Two devices on each of two hosts."""
    device = Device("device", 1e9)
    hosts = tuple(Host(f"h{i}", (device,) * 2, inf, port_bytes_per_s=port) for i in range(2))
    return Cluster("c", hosts)


def test_messages_of_one_host_queue_at_its_port() -> None:
    """Two replicas send two others a micro-batch each: in turn through the port."""
    layer = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0))
    size = Affine(0.0, 1.0)
    profile = ModelProfile("m", (layer,) * 2, (Edge(0, 1, "t", size, Affine()),))
    plan = Plan((Stage(range(1), (0, 1), (1, 1)), Stage(range(1, 2), (2, 3), (1, 1))), 1, 2, "1f1b")
    prediction = simulate_plan(plan, profile, two_hosts(port=2.0))
    sends = [e for e in prediction.timeline.events if e.kind == "SEND"]
    assert [(e.start_s, e.end_s) for e in sends] == [(1.0, 1.5), (1.5, 2.0)]


def test_a_skip_tensor_goes_straight_to_its_reader_once() -> None:
    layer = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0))
    small, large = Affine(0.0, 1.0), Affine(0.0, 8.0)
    edges = (
        Edge(0, 1, "next", small, small),
        Edge(1, 2, "after", small, small),
        Edge(2, 3, "last", small, small),
        Edge(0, 2, "skip", large, large),
        Edge(0, 3, "skip", large, large),
    )
    profile = ModelProfile("m", (layer,) * 4, edges)
    plan = Plan(
        (
            Stage(range(1), (0,), (1,)),
            Stage(range(1, 2), (1,), (1,)),
            Stage(range(2, 4), (2,), (1,)),
        ),
        1,
        1,
        "1f1b",
    )
    timeline = simulate_plan(plan, profile, one_host(3, rate=1.0)).timeline
    sent = [(e.device, e.peer, e.bytes) for e in timeline.events if e.kind == "SEND"]
    assert sorted(sent) == [
        (0, 1, 1.0),
        (0, 2, 8.0),
        (1, 0, 1.0),
        (1, 2, 1.0),
        (2, 0, 8.0),
        (2, 1, 1.0),
    ]


def test_replicas_exchange_statistics_of_batch_norm_in_every_forward_and_backward() -> None:
    """Two layers with 3 normalisations of 8 channels; 4-byte numbers over a ring of two devices."""
    layer = LayerCost("l", Affine(0.0, 1.0), Affine(0.0, 1.0), Affine(0.0, 1.0))
    normed = replace(layer, norms=3, norm_channels=24)
    plan = Plan((Stage(range(2), (0, 1), (2, 2)),), 5, 4, "1f1b")
    rate, latency_s = 1000.0, 0.01
    host = replace(one_host(2, rate=rate).hosts[0], link_latency_s=latency_s)
    there_s = 1e-4 + 2 * latency_s + 2 * (8 + 8 + 1) * 4 / rate
    back_s = 1e-4 + 2 * latency_s + (8 + 8) * 4 / rate
    alone_s, together_s = (
        simulate_plan(plan, ModelProfile("m", (one, one)), Cluster("c", (host,))).iteration_s
        for one in (layer, normed)
    )
    assert together_s - alone_s == pytest.approx(5 * 6 * (there_s + back_s))
