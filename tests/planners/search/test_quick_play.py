"""The quick simulation of points, held to the exact one; and that points and plans are the same."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from bound_strategies import bound_problems
from hypothesis import given, settings
from planning_strategies import problems

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.core.native import Found, Point
from penstock.plan.problem import PlanningProblem
from penstock.planners.search.arms import Arm, arms_of
from penstock.planners.search.points import plan_of_point, point_of
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

NEAR, SHARE = 0.05, 0.95
"""How far the quick simulation may be from the exact one, and for which share of points."""


def random_chain(draw: Random, name: str, most_bytes: float = 4e6) -> PlanningProblem:
    """A chain of unequal layers on hosts whose links take up to the time of a layer."""
    layers = draw.randint(8, 24)
    made: list[LayerCost] = []
    for i in range(layers):
        seconds = draw.uniform(0.5, 1.5) * 1e-3
        cost, weight = Affine(1e-5, seconds), Affine(0.0, seconds)
        saved = Affine(0.0, draw.uniform(1e6, 4e6))
        parameters = int(draw.uniform(1e5, most_bytes))
        made.append(LayerCost(f"layer {i}", cost, cost + weight, weight, parameters, 0, saved))
    sizes = [Affine(0.0, draw.uniform(1e5, 1e6)) for _ in range(layers)]
    edges = tuple(Edge(i, i + 1, f"t{i}", sizes[i], sizes[i]) for i in range(layers - 1))
    hosts = tuple(
        Host(f"h{h}", (Device("d", 4e9, draw.choice([1.0, 0.7])),) * 4, 1e10, 3e9, 1e-5, 3e-5)
        for h in range(2)
    )
    profile = ModelProfile(name, tuple(made), edges, batch_size=8)
    schedules = ("early-backward", "interleaved", "breadth-first", "hanayo", "zb-h1", "zb-h2")
    return PlanningProblem(profile, Cluster(name, hosts), 128, (1, 2, 4, 8), schedules=schedules)


def drawn(arm: Arm, point: Point, seed: int) -> list[Found]:
    """Return random points a few moves away."""
    draw, found = Random(seed), list[Found]()
    for _ in range(20):
        here = point
        for _ in range(3):
            near = arm.play.neighbours(here, inf, 1000)
            if not near:
                break
            found.append(draw.choice(near))
            here = found[-1].point
    return found[::3]


def ratios(style: str, split: bool, seeds: range, most_bytes: float, stride: int) -> list[float]:
    """Quick over exact seconds of random points of an arm, under the schedule that is fastest."""
    found: list[float] = []
    for seed in seeds:
        problem = random_chain(Random(seed), f"drawn {seed}", most_bytes)
        score = make_score(problem)
        arm = next(
            arm
            for arm in arms_of(problem, problem.schedules)
            if (arm.style, arm.split) == (style, split)
        )
        order, groups = [k * stride % 8 + k * stride // 8 for k in range(8)], 4
        point = Point(order, [0, 2, 4, 6, 8], [], [0] * groups, [0] * groups, size=2, depth=0)
        arm.play.even_cuts(point)
        for one in drawn(arm, point, seed):
            plans = [
                plan_of_point(problem, arm.rules, one.point, n, one.depths) for n in arm.schedules
            ]
            exact_s = min(map(score, plans))
            if exact_s < inf:
                found.append(one.seconds / exact_s)
    return found


@pytest.mark.parametrize(("most_bytes", "stride"), [(4e6, 1), (4e7, 4)])
def test_fused_backwards_are_within_five_per_cent_of_the_exact_simulation(
    most_bytes: float, stride: int
) -> None:
    # Between hosts, large buckets are under way while the last gradients are to be sent.
    found = ratios("straight", False, range(12), most_bytes, stride)
    near = [ratio for ratio in found if abs(ratio - 1) <= NEAR]
    assert len(found) > 150
    assert len(near) >= SHARE * len(found)


@pytest.mark.parametrize("seed", range(4))
def test_few_micro_batches_and_a_period_stand_for_all(seed: int) -> None:
    problem = replace(random_chain(Random(seed), "long"), global_batch=512)
    (arm, *_) = arms_of(problem, ("early-backward",))
    point = Point(list(range(8)), [0, 2, 4, 6, 8], [], [0] * 4, [0] * 4, size=0, depth=2)
    arm.play.even_cuts(point)
    few_s = arm.play.seconds(point, inf)
    arm.play.simulates_all = True
    assert few_s == pytest.approx(arm.play.seconds(point, inf), rel=0.02)


@settings(max_examples=40, deadline=None)
@given(problem=bound_problems())
def test_points_near_one_are_plans_that_read_back_as_the_same_points(
    problem: PlanningProblem,
) -> None:
    score = make_score(problem)
    devices = list(range(len(problem.cluster.devices)))
    for arm in arms_of(problem, problem.schedules):
        if arm.style == "mirrored":
            continue
        point = Point(devices, [0, 1], [], [0], [0], size=0, depth=arm.depth)
        arm.play.even_cuts(point)
        for one in drawn(arm, point, 1):
            plan = plan_of_point(problem, arm.rules, one.point, arm.schedules[0], one.depths)
            assert plan.global_batch == problem.global_batch
            assert score(plan) >= 0
            again = point_of(problem, arm.rules, plan)
            assert again is not None
            assert (again.cuts, again.starts) == (one.point.cuts, one.point.starts)
            used = one.point.starts[-1]
            assert again.order[:used] == one.point.order[:used]


@settings(max_examples=40, deadline=None)
@given(problem=problems(memory=False))
def test_a_point_that_the_bound_rules_out_is_not_faster_when_it_is_played(
    problem: PlanningProblem,
) -> None:
    (arm, *_) = arms_of(problem, problem.schedules)
    devices = list(range(len(problem.cluster.devices)))
    point = Point(devices, [0, 1], [], [0], [0], size=0, depth=arm.depth)
    arm.play.even_cuts(point)
    assert arm.play.seconds(point, 0.0) <= arm.play.seconds(point, inf)


def test_near_points_keep_cuts_in_order_and_devices_distinct() -> None:
    problem = random_chain(Random(3), "drawn")
    for arm in arms_of(problem, problem.schedules):
        groups = [0, 2, 4, 6]
        point = Point(list(range(8)), groups, [], [0] * 3, [0] * 3, size=2, depth=arm.depth)
        arm.play.even_cuts(point)
        for one in arm.play.neighbours(point, inf, 60):
            made = one.point
            assert all(lo < hi for lo, hi in pairwise(made.cuts))
            assert all(lo < hi for lo, hi in pairwise(made.starts))
            assert sorted(made.order) == list(range(8))
            assert len(made.cuts) - 1 == made.groups * arm.rounds
