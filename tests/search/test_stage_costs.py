"""The costs that walks compare, against the plain cost model and the simulator."""

import numpy as np
import pytest
from bound_strategies import bound_problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_strategies import problems

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.cost import (
    backward_s,
    device_memory_bytes,
    forward_s,
    rows_by_speed,
    tail_s,
)
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.search.even_loads import search_arrays
from penstock.search.stage_costs import cost_of_stage, depths_that_fit, rows_of
from penstock.simulate.simulation import simulate_plan

ROUNDING = 1e-9
DEPTHS = 8


def drawn_group(problem: PlanningProblem, data: st.DataObject) -> tuple[tuple[int, ...], int]:
    """Some devices in any order, and a size of micro-batch with a row for each."""
    size = data.draw(st.sampled_from(problem.micro_batch_sizes))
    order = data.draw(st.permutations(range(len(problem.cluster.devices))))
    return tuple(order[: data.draw(st.integers(1, min(size, len(order))))]), size


def compiled_rows(problem: PlanningProblem, devices: tuple[int, ...], size: int) -> np.ndarray:
    rows = np.zeros(len(devices), dtype=np.int64)
    rows_of(search_arrays(problem), np.array(devices), 0, len(devices), size, rows)
    return rows


@settings(max_examples=60, deadline=None)
@given(problem=st.one_of(problems(), bound_problems()), data=st.data())
def test_rows_seconds_and_memory_are_those_of_the_plain_model(
    problem: PlanningProblem, data: st.DataObject
) -> None:
    (devices, size), layers = drawn_group(problem, data), len(problem.profile.layers)
    rows = compiled_rows(problem, devices, size)
    assert tuple(rows) == rows_by_speed(problem.cluster, devices, size)
    lo = data.draw(st.integers(0, layers - 1))
    hi = data.draw(st.integers(lo + 1, layers))
    arrays, stage = search_arrays(problem), Stage(range(lo, hi), devices, tuple(map(int, rows)))
    place = (arrays, np.array(devices), 0, len(devices))
    found = cost_of_stage(*place, lo, hi, rows, np.zeros((2, 2)))
    plain = forward_s(problem, stage), backward_s(problem, stage)
    assert found[:2] == pytest.approx(plain, rel=ROUNDING)
    deepest = depths_that_fit(*place, rows, lo, hi, DEPTHS)
    for recompute, depth in zip((False, True), deepest, strict=True):
        fitting = [
            depth
            for depth in range(1, DEPTHS + 1)
            if all(
                device_memory_bytes(problem, stage.layers, n, in_flight=depth, recompute=recompute)
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
    (devices, size), layers = drawn_group(problem, data), len(problem.profile.layers)
    # Where replicas share cores, the cost models slow all down as long as the slowest works.
    assume(not any(host.full_speed_devices for host in problem.cluster.hosts))
    # Between explicit links the simulator finds the best order of a ring.
    assume(not problem.cluster.links)
    rows = compiled_rows(problem, devices, size)
    place = (search_arrays(problem), np.array(devices), 0, len(devices))
    seconds = cost_of_stage(*place, 0, layers, rows, np.zeros((2, 2)))
    micro_batches = problem.global_batch // size
    stage = Stage(range(layers), devices, tuple(map(int, rows)))
    plan = Plan((stage,), micro_batches, size, "1f1b")
    iteration_s = simulate_plan(plan, problem.profile, problem.cluster).iteration_s
    forward, backward, after_s = seconds
    expected_s = micro_batches * (forward + backward) + after_s
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
    costs = cost_of_stage(
        search_arrays(problem), np.array([0, 1]), 0, 2, 0, 1, np.array([1, 1]), np.zeros((2, 2))
    )
    played = simulate_plan(Plan((stage,), 1, 2, "1f1b"), profile, problem.cluster)
    assert sum(costs) == pytest.approx(played.iteration_s) == pytest.approx(2 * (3 + 5))
    assert costs[2] == pytest.approx(tail_s(problem, stage)) == pytest.approx(2 * 5)
