"""GPipe's partition against the exact minimum, Piper's recurrence against brute force."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from reference.stage_formula import crossing_bytes
from statistics_price import slowest_replica_s

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.stage_costs import device_memory_bytes, estimate_s, rows_by_speed
from penstock.costs.tables import ChainCosts, whole_chain
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.coarse_chain import device_line
from penstock.planners.gpipe import balanced_blocks, gpipe
from penstock.planners.piper import piper_table
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

HUGE = 1e15


def chain(times: list[float], saved_bytes: float = 0.0) -> ModelProfile:
    layers = tuple(
        LayerCost(
            f"layer{i}",
            Affine(0.0, seconds / 2),
            Affine(0.0, seconds / 2),
            Affine(),
            saved_bytes=Affine(0.0, saved_bytes),
        )
        for i, seconds in enumerate(times)
    )
    size = Affine(0.0, 1.0)
    edges = tuple(Edge(i, i + 1, f"tensor{i}", size, size) for i in range(len(times) - 1))
    return ModelProfile("chain", layers, edges)


def line_of(speeds: list[float], memory_bytes: float = HUGE) -> Cluster:
    devices = tuple(Device("device", memory_bytes, speed) for speed in speeds)
    return Cluster("line", (Host("host", devices, 1e9),))


@settings(max_examples=100, deadline=None)
@given(
    times=st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=5),
)
def test_blocks_are_the_exact_min_max_partition_weighted_by_speed(
    times: list[float], speeds: list[float]
):
    speeds = speeds[: len(times)]
    problem = PlanningProblem(chain(times), line_of(speeds), 4, (1,), schedules=("gpipe",))
    chain_costs = ChainCosts(problem, tuple(range(len(times) + 1)))
    plan = balanced_blocks(chain_costs, tuple(range(len(speeds))), 1, "gpipe", "off").plan(
        0, "gpipe"
    )
    cuts = (0, *(stage.layers.stop for stage in plan.stages))

    def longest(ends: tuple[int, ...]) -> float:
        return max(
            sum(times[lo:hi]) / speed
            for (lo, hi), speed in zip(pairwise(ends), speeds, strict=True)
        )

    least = min(
        longest((0, *inner, len(times)))
        for inner in combinations(range(1, len(times)), len(speeds) - 1)
    )
    assert longest(cuts) == pytest.approx(least)


@pytest.mark.parametrize("layers, devices, stages", [(6, 3, 3), (2, 4, 2)])
def test_as_many_stages_as_devices_without_replicas_or_fewer_for_fewer_layers(
    layers: int, devices: int, stages: int
):
    problem = PlanningProblem(chain([1.0] * layers), line_of([1.0] * devices), 8, (1, 2))
    plan = gpipe(problem, lambda plan: estimate_s(problem, plan))
    assert [stage.replicas for stage in plan.stages] == [1] * stages
    assert plan.schedule == "gpipe"


def test_recompute_is_chosen_where_keeping_everything_does_not_fit():
    profile, cluster = chain([1.0, 1.0, 1.0, 1.0], saved_bytes=10.0), line_of([1.0, 1.0], 60.0)
    problem = PlanningProblem(profile, cluster, 8, (1,), schedules=("gpipe",))
    plan = gpipe(problem, lambda plan: estimate_s(problem, plan))
    assert [stage.recompute for stage in plan.stages] == [True, True]


def piper_by_enumeration(problem: PlanningProblem, size: int, lo: int, first: int) -> float:
    """Piper's recurrence as on paper: layers from ``lo`` on the devices from ``first``."""
    layers, devices = len(problem.profile.layers), len(problem.cluster.devices)
    if lo == layers:
        return 0.0 if first == devices else inf
    return min(
        (
            max(
                load(problem, size, range(lo, hi), range(first, first + d)),
                piper_by_enumeration(problem, size, hi, first + d),
            )
            for hi in range(lo + 1, layers + 1)
            for d in range(1, min(size, devices - first) + 1)
        ),
        default=inf,
    )


def load(problem: PlanningProblem, size: int, layers: range, window: range) -> float:
    """Compute, parameter synchronisation and messages of one stage; infinite where too large."""
    profile, cluster = problem.profile, problem.cluster
    devices, d, end = tuple(window), len(window), len(cluster.devices)
    micro_batches = problem.global_batch // size
    stage = Stage(layers, devices, rows_by_speed(cluster, devices, size))
    in_flight = min(ceil((end - window.start) / d), micro_batches)
    seconds = slowest_replica_s(problem, stage, forwards=1)
    if problem.recompute == "on" or not holds(problem, stage, in_flight, recompute=False):
        if problem.recompute == "off" or not holds(problem, stage, in_flight, recompute=True):
            return inf
        seconds = slowest_replica_s(problem, stage, forwards=2 if in_flight > 1 else 1)
    for cut, i in ((layers.start, window.start), (layers.stop, window.stop)):
        if 0 < i < end:
            crossing = crossing_bytes(profile, cut).at(size)
            seconds += 2 * crossing / d / cluster.bandwidth(i - 1, i)
    if d > 1:
        slowest = min(cluster.bandwidth(i, i + 1) for i in window[:-1])
        synced = 4 * (d - 1) / d * profile.parameter_bytes(layers) / slowest
        seconds += synced / micro_batches
    return seconds


def holds(problem: PlanningProblem, stage: Stage, in_flight: int, *, recompute: bool) -> bool:
    return all(
        device_memory_bytes(problem, replace(stage, recompute=recompute), rows, in_flight)
        <= problem.cluster.devices[device].memory_bytes
        for device, rows in zip(stage.devices, stage.slices, strict=True)
    )


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_pipers_recurrence_finds_the_least_slowest_stage(problem: PlanningProblem):
    chain_costs = whole_chain(problem)
    for size in problem.micro_batch_sizes:
        line = device_line(tuple(range(len(problem.cluster.devices))), size)
        table = piper_table(chain_costs, line, size, problem.schedules[0])
        for first in range(line.blocks):
            expected = piper_by_enumeration(problem, size, 0, first)
            assert table.seconds(first) == pytest.approx(expected, rel=1e-9)
