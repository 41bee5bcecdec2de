"""Of plans that are about as fast, the one that people would choose."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_like import llama_like, two_hosts

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.planners.search.preference import on_few_hosts, on_whole_hosts, preferred, scatter
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate.score import make_score
from penstock.train.job_file import find_job
from penstock.train.plan_job import problem_of, training_problem


def test_stages_of_a_llama_are_on_neighbours_of_one_host() -> None:
    """The fastest plan found had a stage on devices 0, 3, 10 and 15 of two hosts of 8."""
    asked = planning_problem(llama_like(), two_hosts(), 128, schedule="1f1b")
    score = make_score(asked)
    seconds = [inf]
    plan = find_plan(asked, "search", score, on_step=lambda step: seconds.append(step.seconds))
    assert scatter(asked.cluster, plan) == (0, 0)
    assert score(plan) <= min(seconds) * (1 + asked.as_fast)


def test_a_chain_of_equal_blocks_on_equal_devices_is_planned_soon() -> None:
    """It simulates 1,744 plans: it moves on from the best plan of each schedule."""
    llama, hosts = llama_like(), two_hosts(memory_bytes=80e9)
    asked = planning_problem(llama, hosts, 128, planner="search", sharding="off")
    score, scored = make_score(asked), set[Plan]()

    def counted(plan: Plan) -> float:
        scored.add(plan)
        return score(plan)

    plan = find_plan(asked, "search", counted)
    assert plan.device_groups == (tuple(range(8)), tuple(range(8, 16)))
    assert len(scored) <= 2000


def small_problem(as_fast: float = 0.01, devices: int = 4) -> PlanningProblem:
    """Four equal layers that save 40 MB of a sample, on two hosts."""
    half, saved = Affine(0.0, 1e-3), Affine(0.0, 40e6)
    layer = LayerCost("layer", half, half, half, 1_000_000, 0, saved)
    cluster = two_hosts(devices, memory_bytes=1e9)
    profile = ModelProfile("four", (layer,) * 4)
    return PlanningProblem(profile, cluster, 8, (1, 4), as_fast=as_fast)


def plan_on(*groups: tuple[int, ...], recompute: bool = False) -> Plan:
    """Even stages on these sets of devices, micro-batches of 4."""
    each = 4 // len(groups)
    stages = tuple(
        Stage(
            range(i * each, (i + 1) * each), devices, (4 // len(devices),) * len(devices), recompute
        )
        for i, devices in enumerate(groups)
    )
    return Plan(stages, 2, 4, "1f1b")


def one_by_one(schedule: str) -> Plan:
    """Two stages and eight micro-batches of one sample."""
    stages = (Stage(range(0, 2), (0,), (1,)), Stage(range(2, 4), (1,), (1,)))
    return Plan(stages, 8, 1, schedule)


LESS_GOOD_AND_BETTER = {
    "scattered over hosts": (plan_on((0, 4), (1, 5)), plan_on((0, 1), (4, 5))),
    "gaps on a host": (plan_on((0, 2), (1, 3)), plan_on((0, 1), (2, 3))),
    "more devices": (plan_on((0, 1), (2, 3)), plan_on((0,), (1,))),
    "more stages": (plan_on((0,), (1,), (2,), (3,)), plan_on((0, 1), (2, 3))),
    "backwards in halves": (replace(plan_on((0,), (1,)), schedule="zb-h1"), plan_on((0,), (1,))),
    "an order that is searched": (one_by_one("list"), one_by_one("gpipe")),
    "recompute": (plan_on((0, 1), (2, 3), recompute=True), plan_on((0, 1), (2, 3))),
    "fuller devices": (one_by_one("gpipe"), one_by_one("1f1b")),
}


@pytest.mark.parametrize("reason", LESS_GOOD_AND_BETTER)
def test_of_two_about_as_fast_the_better_one_is_chosen(reason: str) -> None:
    worse, better = LESS_GOOD_AND_BETTER[reason]
    near, far = {worse: 1.0, better: 1.009}, {worse: 1.0, better: 1.011}
    assert preferred(small_problem(), near, lambda plan: near.get(plan, inf)) == (better, 1.009)
    assert preferred(small_problem(), far, lambda plan: far.get(plan, inf)) == (worse, 1.0)


def test_by_default_no_more_than_what_the_pages_say_is_given_away() -> None:
    """No plan may be chosen that is slower than the best by more than 0.2 %."""
    small = small_problem()
    asked = planning_problem(small.profile, small.cluster, 8, planner="search")
    worse, better = LESS_GOOD_AND_BETTER["more devices"]
    for loss, chosen in ((0.0019, better), (0.0021, worse), (0.01, worse)):
        seconds = {worse: 1.0, better: 1 + loss}
        assert preferred(asked, seconds, lambda plan, s=seconds: s.get(plan, inf))[0] == chosen


def test_a_plan_that_is_trained_gains_more_than_predictions_err() -> None:
    """More where ranks share cores."""
    job, small = find_job("digits"), small_problem()
    worse, better = LESS_GOOD_AND_BETTER["more devices"]
    hosts = tuple(replace(host, full_speed_devices=2) for host in small.cluster.hosts)
    for cluster, most in ((small.cluster, 0.03), (replace(small.cluster, hosts=hosts), 0.05)):
        asked = training_problem(problem_of(job, small.profile, cluster), job)
        for loss, chosen in ((most - 0.001, better), (most + 0.001, worse)):
            seconds = {worse: 1.0, better: 1 + loss}
            assert preferred(asked, seconds, lambda plan, s=seconds: s.get(plan, inf))[0] == chosen


def test_devices_are_renamed_only_where_that_is_about_as_fast() -> None:
    problem, scattered = small_problem(), plan_on((0, 4), (1, 5))
    whole = plan_on((0, 1), (2, 3))
    assert preferred(problem, {scattered: 1.0}, lambda plan: 1.005) == (whole, 1.005)
    assert preferred(problem, {scattered: 1.0}, lambda plan: 1.02) == (scattered, 1.0)


@settings(deadline=None)
@given(
    order=st.permutations(range(8)),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda w: sum(w) <= 8),
    speeds=st.lists(st.sampled_from([1.0, 2.0]), min_size=8, max_size=8),
)
def test_packed_sets_have_the_same_kinds_and_are_on_no_more_hosts(
    order: list[int], widths: list[int], speeds: list[float]
) -> None:
    hosts = tuple(
        Host(
            f"h{h}", tuple(Device("D", 1e9, speed) for speed in speeds[4 * h : 4 * h + 4]), 1e9, 1e9
        )
        for h in range(2)
    )
    cluster = Cluster("c", hosts)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    groups = tuple(
        tuple(order[start : start + width]) for start, width in zip(starts, widths, strict=True)
    )
    new = on_few_hosts(cluster, groups)
    taken = [device for group in groups for device in new[group]]
    assert len(set(taken)) == len(taken)
    for group in groups:
        before = [cluster.devices[device] for device in group]
        assert [cluster.devices[device] for device in new[group]] == before
    stages = tuple(
        Stage(range(i, i + 1), group, (1,) * (len(group) - 1) + (9 - len(group),))
        for i, group in enumerate(groups)
    )
    plan = Plan(stages, 1, 8, "1f1b")
    for renamed in on_whole_hosts(cluster, plan):
        assert scatter(cluster, renamed) < scatter(cluster, plan)
        assert [len(stage.devices) for stage in renamed.stages] == widths
