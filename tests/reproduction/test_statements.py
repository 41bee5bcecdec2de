"""Statements of the papers that no other test shows (docs/benchmarks/papers.md)."""

import random
from itertools import combinations
from statistics import median

import numpy as np
import pytest
from reproduction.published import MODELS

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.core.native import dapple_latency_s, dapple_pivot
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.dapple.dapple import dapple
from penstock.planners.dapple.placement import scatter_first
from penstock.planners.spp.device_order import ordered_by_minimum_cuts
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.families.early_backward import deep_early_backward, one_f_one_b
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

PARAMETERS = {
    "gnmt-16": 291e6,
    "bert-48": 640e6,
    "xlnet-36": 500e6,
    "amoeba-36": 933e6,
    "vgg-19": 137e6,
}
"""DAPPLE (PPoPP 2021), table of its models."""


@pytest.mark.parametrize("model", PARAMETERS)
def test_models_have_as_many_parameters_as_the_paper_says(model: str) -> None:
    profile = MODELS[model].profile()
    floats = profile.parameter_bytes(range(len(profile.layers))) / 4
    assert floats == pytest.approx(PARAMETERS[model], rel=0.005)


def test_a_boundary_of_bert_48_has_the_bytes_of_the_paper() -> None:
    """8.8 MB there and back, for micro-batches of two samples."""
    edges = MODELS["bert-48"].profile().edges
    sizes = sorted(edge.bytes.at(2) + edge.gradient_bytes.at(2) for edge in edges)
    assert sizes[len(sizes) // 2] / 1e6 == pytest.approx(8.8, rel=0.02)


def warm_ups(schedule: Schedule) -> list[int]:
    """Forwards of each stage before its first backward."""
    return [[action.kind for action in order].index("B") for order in schedule.orders]


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("held", range(1, 12))
def test_warm_ups_are_those_of_both_policies_where_memory_holds_so_many(
    stages: int, held: int
) -> None:
    """DAPPLE: K = min(S - i, D) by P_A, and min(2 (S - i) - 1, D) by P_B."""
    cost = StageCost(1.0, 1.0, 1.0, saved_bytes=1.0)
    shape = PipelineShape(stages, 12, costs=(cost,) * stages, memory_bytes=(float(held),) * stages)
    assert warm_ups(one_f_one_b(shape)) == [min(stages - i, held) for i in range(stages)]
    assert warm_ups(deep_early_backward(shape)) == [
        min(2 * (stages - i) - 1, held) for i in range(stages)
    ]


@pytest.mark.parametrize(("parameter_bytes", "later_s"), [(20, 0.0), (40, 0.0), (60, 2.0)])
def test_the_gradients_of_a_late_stage_are_summed_while_the_first_still_works(
    parameter_bytes: int, later_s: float
) -> None:
    """Two stages, F = 2, B = 4: after the last stage's end the first has one backward to do."""
    layers = (
        LayerCost("a", Affine(0.0, 1.0), Affine(0.0, 1.0), Affine(0.0, 1.0)),
        LayerCost("b", *(Affine(0.0, 2.0),) * 3, parameter_bytes=parameter_bytes),
    )
    nothing = Affine()
    profile = ModelProfile("two", layers, (Edge(0, 1, "t", nothing, nothing),))
    cluster = Cluster("three", (Host("host", (Device("d", 1e12),) * 3, 10.0),))
    stages = (Stage(range(1), (0,), (2,)), Stage(range(1, 2), (1, 2), (1, 1)))
    played = simulate_plan(Plan(stages, 8, 2, "1f1b"), profile, cluster)
    assert played.iteration_s == pytest.approx((8 + 1) * (2.0 + 4.0) + later_s)


@pytest.mark.parametrize(
    ("free", "occupied", "count", "taken"),
    [
        ((5, 5, 8), (3, 3, 0), 4, (2, 2, 0)),
        ((5, 5, 8), (3, 3, 0), 9, (5, 4, 0)),
        ((8, 8, 8), (0, 0, 0), 6, (2, 2, 2)),
    ],
)
def test_scatter_first_takes_as_many_from_each_server_in_use(
    free: tuple[int, ...], occupied: tuple[int, ...], count: int, taken: tuple[int, ...]
) -> None:
    """DAPPLE: from all servers only where none is in use."""
    assert scatter_first(free, occupied, count) == taken


@pytest.mark.parametrize(("bytes_there", "schedule"), [(0, "1f1b"), (1000, "early-backward")])
def test_the_deeper_warm_up_is_chosen_where_stages_wait_for_messages(
    bytes_there: int, schedule: str
) -> None:
    """DAPPLE takes P_B where ACR is large; here the simulator says where it pays."""
    layer = LayerCost("l", *[Affine(0.0, 1.0)] * 3, 1_000_000)
    size = Affine(0.0, bytes_there)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(3))
    cluster = Cluster("c", (Host("h", (Device("d", 1e12),) * 4, 1000.0),))
    problem = PlanningProblem(ModelProfile("chain", (layer,) * 4, edges), cluster, 16, (1,))
    plan = dapple(problem, make_score(problem))
    assert (len(plan.stages), plan.schedule) == (4, schedule)


def printed_s(
    forward: list[float], backward: list[float], reduce: list[float], count: int
) -> float:
    """DAPPLE's latency as usually quoted: the pivot's own backward counts behind the pivot too."""
    pivot = dapple_pivot(forward, backward, count)
    ending_s = max(
        reduce[s] + (sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot : s + 1]))
        for s in range(len(forward))
    )
    steady_s = (count - 1) * (forward[pivot] + backward[pivot])
    return sum(forward[: pivot + 1]) + steady_s + ending_s


def test_the_latency_is_the_quoted_one_in_the_median_and_more_with_few_micro_batches() -> None:
    """Every second stage is a transfer."""
    draw = random.Random(1)
    few: list[float] = []
    many: list[float] = []
    for _ in range(20_000):
        stages = range(draw.choice((1, 3, 5, 7, 9)))
        forward = [draw.uniform(0.0, 0.5) if s % 2 else draw.uniform(0.1, 2.0) for s in stages]
        backward = [seconds * draw.uniform(1.0, 2.5) for seconds in forward]
        reduce = [0.0 if s % 2 else draw.choice((0.0, draw.uniform(0.0, 10.0))) for s in stages]
        count = draw.randint(1, 20)
        ours_s = dapple_latency_s(forward, backward, reduce, count)
        ratio = ours_s / printed_s(forward, backward, reduce, count)
        (many if count >= 2 * len(stages) else few).append(ratio)
    assert min(few + many) > 1 - 1e-12
    assert median(few) == median(many) == pytest.approx(1.0)
    assert max(few) == pytest.approx(1.82, abs=0.005)
    assert max(many) == pytest.approx(1.23, abs=0.005)


def keeps_minimum_cuts(order: tuple[int, ...], weights: np.ndarray) -> bool:
    """Whether some division of ``order`` is a minimum cut of its devices, and so in both parts."""
    if len(order) <= 2:
        return True

    def cut(side: tuple[int, ...]) -> float:
        return weights[np.ix_(side, [v for v in order if v not in side])].sum()

    least = min(cut(side) for n in range(1, len(order)) for side in combinations(order, n))
    return any(
        cut(order[:k]) <= least * (1 + 1e-9)
        and keeps_minimum_cuts(order[:k], weights)
        and keeps_minimum_cuts(order[k:], weights)
        for k in range(1, len(order))
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_devices_is_cut_at_least_cost_on_every_level(seed: int) -> None:
    """SPP: recursive device ordering, here with any weights on seven devices."""
    weights = 10 ** np.random.default_rng(seed).uniform(0, 3, (7, 7))
    weights += weights.T
    np.fill_diagonal(weights, 0.0)
    order = ordered_by_minimum_cuts(weights, [(device,) for device in range(7)])
    assert keeps_minimum_cuts(tuple(order), weights)
