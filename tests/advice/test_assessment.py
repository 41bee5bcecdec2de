import json
from dataclasses import replace
from math import inf

import pytest

from penstock.advice.assessment import Baselines, assess_plan, baselines_of
from penstock.advice.baselines import best_rival
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.lower_bound import lower_bound
from penstock.costs.sharding import with_sharding
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem, problem_of_plan
from penstock.planners.spp.bound import spp_bound_s
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    host = cluster.hosts[0]
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in host.devices)
    return Cluster(cluster.name, (replace(host, devices=devices),))


def test_a_hand_written_plan_is_measured_against_the_same_yardsticks(
    small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    problem = problem_of_plan(small_plan, small_profile, small_cluster)
    score = make_score(problem)
    planned = assess_plan(small_plan, problem, baselines_of(problem, score))
    alone = find_plan(problem, "single-device", score)
    alone_s = simulate_plan(alone, small_profile, small_cluster).iteration_s
    assert planned.speedup_over_one_device == pytest.approx(
        alone_s / planned.prediction.iteration_s
    )
    assert planned.gap >= 0


@pytest.mark.parametrize("planner", ["single-device", "pipedream", "dapple"])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zero-bubble"])
def test_a_schedule_unknown_to_a_planner_takes_over_its_devices(
    small_plan: Plan,
    small_profile: ModelProfile,
    small_cluster: Cluster,
    planner: str,
    schedule: str,
) -> None:
    problem = problem_of_plan(small_plan, small_profile, small_cluster)
    known = replace(problem, schedules=("1f1b",))
    own = find_plan(known, planner, make_score(known))
    other = replace(problem, schedules=(schedule,))
    plan = find_plan(other, planner, make_score(other))
    assert (plan.planner, plan.schedule) == (planner, schedule)
    assert set(plan.device_groups) <= set(own.device_groups)


def test_one_device_is_the_yardstick_even_where_its_memory_is_too_small(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    tight = with_memory(small_cluster, 20e6)
    problem = planning_problem(small_profile, tight, 12)
    baselines = baselines_of(problem, make_score(problem))
    assert 0 < baselines.one_device_s < inf
    assert baselines.data_parallel_s == inf


def test_what_is_infinite_is_null_in_json(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    problem = planning_problem(small_profile, with_memory(small_cluster, 20e6), 12)
    score = make_score(problem)
    planned = assess_plan(
        find_plan(problem, "search", score), problem, baselines_of(problem, score)
    )
    values = json.loads(json.dumps(planned.to_json(0.5), allow_nan=False))
    assert values["speedup_over_data_parallel"] is None
    assert values["planning_s"] == 0.5


def test_every_plan_has_the_bounds_of_its_problem(
    small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    problem = problem_of_plan(small_plan, small_profile, small_cluster)
    planned = assess_plan(small_plan, problem, Baselines(1.0))
    values = planned.to_json(0.0)
    assert values["bound_argument"] == lower_bound(problem).argument != ""
    assert values["lower_bound_s"] == lower_bound(problem).seconds
    assert values["spp_bound_s"] is None


def test_spps_bound_is_shown_for_its_own_order_only(
    small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    listed = replace(small_plan, schedule="wavefront")
    problem = problem_of_plan(listed, small_profile, small_cluster)
    planned = assess_plan(listed, problem, Baselines(1.0))
    assert planned.to_json(0.0)["spp_bound_s"] == spp_bound_s(problem, listed)
    assert planned.prediction.iteration_s <= planned.spp_bound_s
    limited = replace(listed, in_flight_limit=(1,) * len(listed.stages))
    assert assess_plan(limited, problem, Baselines(1.0)).spp_bound_s == inf


def test_a_plan_of_a_problem_that_nothing_fits_has_no_gap(
    small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    problem = problem_of_plan(small_plan, small_profile, with_memory(small_cluster, 1e5))
    values = assess_plan(small_plan, problem, Baselines(1.0)).to_json(0.0)
    assert values["lower_bound_s"] is None and values["gap"] is None
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_data_parallelism_without_overlap_exchanges_after_the_last_backward(
    micro_batches: int,
) -> None:
    """Forwards and backwards of the slower device, then 160 MB around a ring of two at 1 GB/s."""
    work = Affine(0.0, 0.25)
    layers = (LayerCost("block", work, work, work, 40_000_000),) * 4
    profile = ModelProfile("m", layers, step_s_per_byte=1e-9)
    devices = (Device("gpu", 1e12), Device("gpu", 1e12, speed=0.5))
    cluster = Cluster("c", (Host("h", devices, 1e9),))
    batch = 3 * micro_batches
    problem = planning_problem(profile, cluster, batch, micro_batch_size=3, memory_reserve=0.0)
    rivals = baselines_of(problem, make_score(problem)).rivals
    plain, late = rivals[0], next(one for one in rivals if one.name.endswith("without overlap"))
    # Two rows on the quick device, one on the slow one: 3 * 4 * 0.25 s a row at speed 1.
    computed_s = micro_batches * 6.0
    assert late.iteration_s == pytest.approx(computed_s + 0.160 + 0.160 / 0.5)
    assert computed_s + 0.320 < plain.iteration_s < late.iteration_s
    assert late.peak_memory_bytes == plain.peak_memory_bytes


def test_a_plan_is_compared_with_data_parallelism_of_every_kind() -> None:
    # A device has room for parameters, gradients and Adam's state of 80 MB of parameters, but not
    # for 160 MB of activations beside them; with ZeRO-1 it has.
    work, size = Affine(0.1, 1.0), Affine(0.0, 1e6)
    layer = LayerCost("block", work, work, work, 10_000_000, saved_bytes=Affine(0.0, 20e6))
    edges = tuple(Edge(i, i + 1, f"x{i}", size, size) for i in range(7))
    profile = ModelProfile("hungry", (layer,) * 8, edges, batch_size=4)
    cluster = Cluster("c", (Host("h", (Device("gpu", 400e6),) * 4, 1e9),))
    problem = planning_problem(profile, cluster, 4, memory_reserve=0.0)
    score = make_score(problem)
    found = baselines_of(problem, score)
    # The profile does not say what a step in host memory takes, so there is no FSDP with one.
    plain, by_block, zero, fsdp, late, naive = found.rivals
    # One card at a time is no faster than one card with the memory of all.
    assert found.one_device_s <= naive.iteration_s < inf
    assert naive.peak_memory_bytes <= 400e6
    known = replace(profile, host_step_s_per_byte=1e-12)
    told = baselines_of(replace(problem, profile=known), make_score(problem)).rivals[-1]
    assert told.peak_memory_bytes < fsdp.peak_memory_bytes
    small = replace(cluster.hosts[0], memory_bytes=1e6)
    little = replace(problem, profile=known, cluster=replace(cluster, hosts=(small,)))
    assert baselines_of(little, make_score(little)).rivals[-1].iteration_s == inf
    assert late.iteration_s == inf
    assert (plain.iteration_s, plain.to_json()["peak_memory_bytes"]) == (inf, None)

    whole = Plan((Stage(range(8), (0, 1, 2, 3), (1,) * 4),), 1, 4, "1f1b")
    blocks = simulate_plan(with_recompute(whole, False, by_block=True), profile, cluster)
    assert by_block.iteration_s == pytest.approx(blocks.iteration_s)
    assert by_block.peak_memory_bytes == pytest.approx(max(blocks.peak_memory_bytes))
    divided = simulate_plan(with_sharding(whole, "optimizer"), profile, cluster)
    assert zero.iteration_s == pytest.approx(divided.iteration_s)
    assert zero.peak_memory_bytes == pytest.approx(max(divided.peak_memory_bytes))

    priced = simulate_plan(with_sharding(whole, "parameters"), profile, cluster)
    assert fsdp.iteration_s == pytest.approx(priced.iteration_s)
    assert fsdp.peak_memory_bytes == pytest.approx(max(priced.peak_memory_bytes))
    # FSDP hides a little more, but not enough to be called faster.
    assert fsdp.iteration_s < zero.iteration_s < fsdp.iteration_s * 1.002
    assert best_rival((plain, by_block, zero, fsdp)) == zero
    slower = replace(zero, iteration_s=zero.iteration_s * 1.01)
    assert best_rival((plain, by_block, slower, fsdp)) == fsdp

    plan = find_plan(problem, "search", score)
    assert plan.stages[0].sharding == "optimizer" and score(plan) <= zero.iteration_s
    undivided = replace(problem, sharding="off")
    plan = find_plan(undivided, "search", score)
    words = assess_plan(plan, undivided, baselines_of(problem, score)).rival_words()
    factor = zero.iteration_s / score(plan)
    # A batch of four rows is too small for a pipeline.
    assert factor < 0.9
    assert words == (f"DDP does not fit, {factor:.2f}x ZeRO-1 (360 MB), which is faster")
    slow = Baselines(1.0, (plain, replace(zero, iteration_s=2 * score(plan))))
    words = assess_plan(plan, problem, slow).rival_words()
    assert words == "DDP does not fit, 2.00x ZeRO-1 (360 MB)"
    assert best_rival(()) is None
