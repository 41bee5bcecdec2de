"""Lower bounds by hand; that no plan beats them is in test_every_planner."""

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.bounds import gap, lower_bound_s, plan_bound_s
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate.score import make_score


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


def test_gap_is_relative_to_the_bound():
    assert gap(3.0, 2.0) == pytest.approx(0.5)
    assert gap(1.0, 0.0) == float("inf")
