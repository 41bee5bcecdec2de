"""Lower bounds by hand; that no plan beats them is in test_bounds_hold."""

from random import Random

import numpy as np
import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.link_bound import CoreWork, Hosts
from penstock.costs.lower_bound import gap, lower_bound_s, plan_bound_s
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

MEGABYTE = 1_000_000


def problem(
    cost: Affine, devices: int, batch: int, sizes: tuple[int, ...], cores: int = 0
) -> PlanningProblem:
    layer = LayerCost("only", cost, Affine(), Affine())
    host = Host("h", (Device("d", 1e9),) * devices, 1e9, full_speed_devices=cores)
    profile = ModelProfile("one layer", (layer,), batch_size=8)
    return PlanningProblem(profile, Cluster("c", (host,)), batch, sizes)


def test_work_is_shared_by_all_devices():
    assert lower_bound_s(problem(Affine(0.0, 1.0), devices=4, batch=32, sizes=(8,))) == 8.0


def test_devices_that_share_cores_count_as_the_cores():
    shared = problem(Affine(0.0, 1.0), devices=4, batch=32, sizes=(8,), cores=2)
    assert lower_bound_s(shared) == 16.0


def test_a_micro_batch_is_cut_into_no_more_slices_than_it_has_samples():
    assert lower_bound_s(problem(Affine(0.0, 1.0), devices=4, batch=32, sizes=(2,))) == 16.0


def test_fixed_costs_are_paid_for_every_micro_batch():
    assert lower_bound_s(problem(Affine(2.0, 0.0), devices=1, batch=32, sizes=(8, 4))) == 8.0


def test_a_stage_waits_for_the_first_micro_batch_to_come_down_and_the_last_to_go_up():
    layers = tuple(LayerCost(n, Affine(0.0, 1.0), Affine(0.0, 2.0), Affine()) for n in "ab")
    host = Host("h", (Device("d", 1e9),) * 3, 1e9)
    asked = PlanningProblem(ModelProfile("two", layers), Cluster("c", (host,)), 8, (2,))
    first = Stage(range(0, 1), (0, 1), (1, 1))
    plan = Plan((first, Stage(range(1, 2), (2,), (2,))), 4, 2, "1f1b")
    assert plan_bound_s(asked, plan) == (1 + 2) + 4 * 2 * (1 + 2)
    assert make_score(asked)(plan) == plan_bound_s(asked, plan)


def test_the_all_reduce_of_an_earlier_stage_waits_for_the_drain():
    cost = Affine(0.0, 1.0)
    sizes = (20 * MEGABYTE, 0)
    layers = tuple(LayerCost(f"{size}", cost, cost, cost, size) for size in sizes)
    host = Host("h", (Device("d", 1e9),) * 3, 10.0 * MEGABYTE)
    asked = PlanningProblem(ModelProfile("two", layers), Cluster("c", (host,)), 8, (2,))
    stages = (Stage(range(0, 1), (0, 1), (1, 1)), Stage(range(1, 2), (2,), (2,)))
    plan = Plan(stages, 4, 2, "1f1b")
    # Fill, all micro-batches on the last stage, then a backward and a ring of two over 20 MB.
    seconds = 1 + 4 * 2 * 3 + 2 + 2
    assert plan_bound_s(asked, plan) == pytest.approx(seconds)
    assert make_score(asked)(plan) == pytest.approx(seconds)


def test_gap_is_relative_to_the_bound():
    assert gap(3.0, 2.0) == pytest.approx(0.5)
    assert gap(1.0, 0.0) == float("inf")


def test_on_separate_links_a_device_receives_from_several_at_once() -> None:
    layer = LayerCost("layer", Affine(), Affine(), Affine())
    edges = (Edge(0, 1, "tensor", Affine(0.0, 100.0), Affine()),)
    profile = ModelProfile("two", (layer, layer), edges)
    host = Host("host", (Device("device", 1e9),) * 3, link_bytes_per_s=100.0, separate_links=True)
    problem = PlanningProblem(profile, Cluster("three", (host,)), 4, (4,))
    plan = Plan((Stage(range(1), (0, 1), (2, 2)), Stage(range(1, 2), (2,), (4,))), 1, 4, "1f1b")
    # Two messages of two rows, side by side.
    assert make_score(problem)(plan) == pytest.approx(2.0)
    assert plan_bound_s(problem, plan) <= 2.0


def test_time_that_just_suffices_is_enough_however_it_is_rounded():
    """Layers without parameters, on links that cost nothing, are shared by the hosts' speeds."""
    random = Random(1)
    for _ in range(200):
        speeds, layer_s = (np.array([random.uniform(0.1, 3) for _ in range(n)]) for n in (3, 7))
        free = np.full(3, 1e30)
        hosts = Hosts(speeds, np.full(3, 1e9), free, free, free)
        work = CoreWork(hosts, 64, 1.0, layer_s, np.zeros(7), 0.0, 0.0)
        least_s = 64 * layer_s.sum() / speeds.sum()
        assert work.is_enough(least_s)
        assert not work.is_enough(0.999 * least_s)
