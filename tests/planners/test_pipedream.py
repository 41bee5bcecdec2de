"""PipeDream's dynamic program against the enumeration of partitions, and its levels."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given, settings
from planning_strategies import problems

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.presets import find_cluster
from penstock.plan.cost import crossing_bytes
from penstock.plan.problem import PlanningProblem
from penstock.planners.pipedream import levels_of, pipedream, pipedream_candidates
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

ROUNDING = 1e-9


def partitions(layers: int, workers: int, rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """First layer, end and workers of all stages, in every way; workers may stay idle."""

    def rest(lo: int, left: int) -> Iterator[list[tuple[int, int, int]]]:
        if lo == layers:
            yield []
        for hi in range(lo + 1, layers + 1):
            for count in range(1, min(left, rows) + 1):
                for more in rest(hi, left - count):
                    yield [(lo, hi, count), *more]

    return rest(0, workers)


def slowest_s(
    problem: PlanningProblem, stages: list[tuple[int, int, int]], size: int, rate: float
) -> float:
    """The bottleneck of a partition with PipeDream's factors of 4 and 2."""
    profile = problem.profile
    speed = min(device.speed for device in problem.cluster.devices)

    def moved_s(cut: int) -> float:
        there = crossing_bytes(profile, cut, lambda edge: edge.bytes)
        back = crossing_bytes(profile, cut, lambda edge: edge.gradient_bytes)
        return (there + back).at(size) / rate

    slowest = 0.0
    for lo, hi, count in stages:
        compute_s = profile.forward_s(range(lo, hi), size) + profile.backward_s(range(lo, hi), size)
        reduce_s = 4 * (count - 1) * profile.parameter_bytes(range(lo, hi)) / (rate * count)
        slowest = max(slowest, (compute_s / speed + reduce_s) / count)
        if lo > 0:
            output_s = moved_s(hi) if hi < len(profile.layers) else 0.0
            slowest = max(slowest, moved_s(lo) / count, output_s / count)
    return slowest


@given(problems(memory=False))
@settings(max_examples=60, deadline=None)
def test_on_one_level_the_bottleneck_is_the_least_of_all_partitions(
    problem: PlanningProblem,
) -> None:
    levels = levels_of(problem.cluster)
    assume(len(levels) == 1)
    workers, layers = len(levels[0].members), len(problem.profile.layers)
    for size in problem.micro_batch_sizes:
        one_size = replace(problem, micro_batch_sizes=(size,))
        (candidate,) = pipedream_candidates(one_size)
        least_s = min(
            slowest_s(problem, stages, size, levels[0].bytes_per_s)
            for stages in partitions(layers, workers, size)
        )
        assert candidate.estimate_s == pytest.approx(least_s, rel=ROUNDING)
        found = [(s.layers.start, s.layers.stop, s.replicas) for s in candidate.plan.stages]
        own_s = slowest_s(problem, found, size, levels[0].bytes_per_s)
        assert own_s == pytest.approx(least_s, rel=ROUNDING)


def test_hosts_of_different_size_are_one_level_at_the_slowest_rate() -> None:
    two = Host("two", (Device("d", 1e9),) * 2, link_bytes_per_s=9.0, port_bytes_per_s=5.0)
    one = Host("one", (Device("d", 1e9),), link_bytes_per_s=9.0, port_bytes_per_s=3.0)
    (level,) = levels_of(Cluster("c", (two, one)))
    assert level.members == ((0,), (1,), (2,)) and level.bytes_per_s == 3.0
    inside, across = levels_of(Cluster("c", (two, two)))
    assert inside.members == ((0,), (1,)) and inside.bytes_per_s == 9.0
    assert across.members == ((0, 1), (2, 3)) and across.bytes_per_s == 5.0


def chain(parameter_bytes: list[int]) -> ModelProfile:
    """Equal work in every layer, small tensors between them."""
    work, small = Affine(0.0, 1e-3), Affine(0.0, 1e4)
    layers = tuple(LayerCost(f"l{i}", work, work, work, p) for i, p in enumerate(parameter_bytes))
    edges = tuple(Edge(i, i + 1, f"t{i}", small, small) for i in range(len(layers) - 1))
    return ModelProfile("chain", layers, edges, batch_size=32)


def test_layers_without_many_parameters_are_replicated_and_the_others_are_not() -> None:
    profile = chain([1000] * 9 + [400_000_000] * 3)
    problem = PlanningProblem(profile, find_cluster("dapple-b"), 512, (32,))
    plan = pipedream(problem, make_score(problem))
    assert plan.stages[0].replicas > 1
    assert all(stage.replicas == 1 for stage in plan.stages if stage.layers.stop > 9)


def test_hosts_that_share_a_stage_run_the_same_inner_pipeline() -> None:
    profile = chain([1000])
    problem = PlanningProblem(profile, find_cluster("dapple-a"), 512, (64,))
    plan = pipedream(problem, make_score(problem))
    hosts = problem.cluster.host_index
    for stage in plan.stages:
        counts = [sum(hosts[d] == host for d in stage.devices) for host in (0, 1)]
        assert len({count for count in counts if count}) == 1
    assert any({hosts[d] for d in stage.devices} == {0, 1} for stage in plan.stages)


def test_memory_keeps_a_stage_small() -> None:
    layers = tuple(
        replace(layer, saved_bytes=Affine(0.0, 1e8)) for layer in chain([1000] * 8).layers
    )
    profile = replace(chain([1000] * 8), layers=layers)
    host = Host("h", (Device("d", 14.5e8),) * 4, 1e9)
    problem = PlanningProblem(profile, Cluster("c", (host,)), 8, (1,), recompute="off")
    score = make_score(problem)
    plan = pipedream(problem, score)
    assert score(plan) < inf
    assert len(plan.stages) == 4
