"""The costs that walks compare, against the plain cost model and the simulator."""

from dataclasses import replace

import pytest
from bound_strategies import bound_problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_strategies import problems

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.core import native
from penstock.costs.sharding import with_sharding
from penstock.costs.stage_costs import (
    device_memory_bytes,
    rows_by_speed,
    stage_seconds,
)
from penstock.costs.tables import search_costs
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate.simulation import simulate_plan

ROUNDING = 1e-9
DEPTHS = 8
DIVIDED = st.sampled_from(["off", "optimizer", "parameters"])


def drawn_group(problem: PlanningProblem, data: st.DataObject) -> tuple[tuple[int, ...], int]:
    """Some devices in any order, and a size of micro-batch with a row for each."""
    size = data.draw(st.sampled_from(problem.micro_batch_sizes))
    order = data.draw(st.permutations(range(len(problem.cluster.devices))))
    return tuple(order[: data.draw(st.integers(1, min(size, len(order))))]), size


@settings(max_examples=60, deadline=None)
@given(problem=st.one_of(problems(), bound_problems()), data=st.data())
def test_rows_seconds_and_memory_are_those_of_the_plain_model(
    problem: PlanningProblem, data: st.DataObject
) -> None:
    problem = replace(problem, sharding=data.draw(DIVIDED))
    # Between explicit links, walks take a group's devices in their order, and not in the best one.
    waits = problem.profile.has_norms or problem.sharding == "parameters"
    assume(not (problem.cluster.links and waits))
    (devices, size), layers = drawn_group(problem, data), len(problem.profile.layers)
    costs, rows = search_costs(problem), rows_by_speed(problem.cluster, devices, size)
    assert tuple(native.rows_of(costs, devices, size)) == rows
    lo = data.draw(st.integers(0, layers - 1))
    hi = data.draw(st.integers(lo + 1, layers))
    stage = Stage(range(lo, hi), devices, rows)
    found = native.stage_cost(costs, devices, lo, hi, size, DEPTHS)
    plain = stage_seconds(problem, stage)
    assert found.forward_s == pytest.approx(plain.forward_s, rel=ROUNDING)
    assert found.backward_s == pytest.approx(plain.backward_s, rel=ROUNDING)
    for recompute, depth in ((False, found.kept), (True, found.leaner)):
        fitting = [
            depth
            for depth in range(1, DEPTHS + 1)
            if all(
                device_memory_bytes(problem, replace(stage, recompute=recompute), n, depth)
                <= problem.cluster.devices[device].memory_bytes
                for device, n in zip(devices, stage.slices, strict=True)
            )
        ]
        assert depth == max(fitting, default=0)


@settings(max_examples=60, deadline=None)
@given(problem=bound_problems(), data=st.data())
def test_a_stage_alone_takes_what_the_simulator_says(
    problem: PlanningProblem, data: st.DataObject
) -> None:
    sharding = data.draw(DIVIDED)
    problem = replace(problem, sharding=sharding)
    (devices, size), layers = drawn_group(problem, data), len(problem.profile.layers)
    # Where replicas share cores, the cost models slow all down as long as the slowest works.
    assume(not any(host.full_speed_devices for host in problem.cluster.hosts))
    # Between explicit links the simulator finds the best order of a ring.
    assume(not problem.cluster.links)
    micro_batches = problem.global_batch // size
    cost = native.stage_cost(search_costs(problem), devices, 0, layers, size, micro_batches)
    stage = Stage(range(layers), devices, rows_by_speed(problem.cluster, devices, size))
    plan = Plan((stage,), micro_batches, size, "1f1b")
    plan = plan if sharding == "off" else with_sharding(plan, sharding)
    iteration_s = simulate_plan(plan, problem.profile, problem.cluster).iteration_s
    expected_s = micro_batches * (cost.forward_s + cost.backward_s) + cost.after_s
    assert iteration_s <= expected_s * (1 + ROUNDING)
    # One replica may be slowest in forwards, and another in backwards.
    speeds = [problem.cluster.devices[device].speed for device in devices]
    if len(set(zip(stage.slices, speeds, strict=True))) == 1:
        assert iteration_s == pytest.approx(expected_s, rel=ROUNDING)


def test_the_optimizer_step_takes_longer_where_replicas_share_cores() -> None:
    one = Affine(0.0, 1.0)
    layer = LayerCost("layer", one, one, one, parameter_bytes=10)
    profile = ModelProfile("one", (layer,), step_s_per_byte=0.5)
    host = Host("host", (Device("device", 1e9),) * 2, 1e12, full_speed_devices=1)
    problem = PlanningProblem(profile, Cluster("one", (host,)), 2, (2,))
    stage = Stage(range(1), (0, 1), (1, 1))
    cost = native.stage_cost(search_costs(problem), (0, 1), 0, 1, 2, 1)
    played = simulate_plan(Plan((stage,), 1, 2, "1f1b"), profile, problem.cluster)
    whole_s = cost.forward_s + cost.backward_s + cost.after_s
    assert whole_s == pytest.approx(played.iteration_s) == pytest.approx(2 * (3 + 5))
    assert cost.after_s == pytest.approx(2 * 5)
    assert cost.after_s == pytest.approx(stage_seconds(problem, stage).after_s)
