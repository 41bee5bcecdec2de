import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf

import pytest

from penstock.advice.plan_pipeline import plan_pipeline
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput, Infeasible
from penstock.plan.plan import Plan
from penstock.planners.find_plan import TimeLimit, find_plan, score_until
from penstock.planners.problem import planning_problem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan


def test_a_plan_covers_the_model_and_fits_the_cluster(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    plan = plan_pipeline(small_profile, small_cluster, 12)
    assert plan.global_batch == 12 and plan.planner == "search"
    assert simulate_plan(plan, small_profile, small_cluster).fits


def test_settings_are_obeyed(small_profile: ModelProfile, small_cluster: Cluster) -> None:
    plan = plan_pipeline(
        small_profile,
        small_cluster,
        12,
        planner="dynamic-program",
        micro_batch_size=3,
        schedule="gpipe",
        recompute="on",
    )
    assert (plan.planner, plan.schedule, plan.micro_batch_size) == ("dynamic-program", "gpipe", 3)
    assert all(stage.recompute for stage in plan.stages)


def test_every_divisor_of_the_batch_is_tried_where_no_size_is_given(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    assert planning_problem(small_profile, small_cluster, 12).micro_batch_sizes == (
        12,
        6,
        4,
        3,
        2,
        1,
    )


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"planner": "dynamic"}, "did you mean 'dynamic-program'?"),
        ({"schedule": "one"}, "use one that 'penstock list' names"),
    ],
)
def test_an_unknown_name_is_refused(
    small_profile: ModelProfile, small_cluster: Cluster, option: dict[str, str], hint: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(f"is unknown; {hint}")):
        plan_pipeline(small_profile, small_cluster, 12, **option)  # type: ignore[arg-type]


def test_after_the_time_limit_no_further_plan_is_better(small_plan: Plan) -> None:
    clock = count().__next__
    scores = iter([inf, 5.0, 4.0])
    limited = score_until(lambda plan: next(scores), deadline_s=-0.5, clock=clock)
    plans = [replace(small_plan, micro_batches=count) for count in (1, 2, 3, 2, 1)]
    assert [limited(plan) for plan in plans] == [inf, 5.0, inf, 5.0, inf]


def test_a_plan_that_another_planner_takes_over_keeps_its_time(small_plan: Plan) -> None:
    limited = score_until(lambda plan: 5.0, deadline_s=-1.0, clock=lambda: 0.0)
    assert limited(small_plan) == 5.0
    assert limited(replace(small_plan, planner="search")) == 5.0


def test_before_the_time_limit_the_score_is_the_score(small_plan: Plan) -> None:
    limited = score_until(lambda plan: float(plan.micro_batches), deadline_s=1.0, clock=lambda: 0.0)
    other = replace(small_plan, micro_batches=3)
    assert [limited(small_plan), limited(other)] == [6.0, 3.0]


@pytest.mark.parametrize("schedules", [("zb-h1",), ("1f1b", "zb-h1", "zb-h2", "interleaved")])
def test_a_time_limit_also_ends_the_trials_of_schedules_that_planners_do_not_search(
    small_profile: ModelProfile, small_cluster: Cluster, schedules: tuple[str, ...]
) -> None:
    asked = replace(planning_problem(small_profile, small_cluster, 12), schedules=schedules)
    scored: list[Plan] = []
    score = make_score(asked)

    def noted(plan: Plan) -> float:
        scored.append(plan)
        return score(plan)

    def trials(limit: TimeLimit | None) -> int:
        scored.clear()
        plan = find_plan(asked, "gpipe", noted, limit=limit)
        assert plan.schedule in schedules and score(plan) < inf
        return len({other for other in scored if other.schedule.startswith(("zb", "inter"))})

    unlimited = trials(None)
    assert trials(TimeLimit(1.0, lambda: 0.0)) == unlimited
    up = count()
    assert trials(TimeLimit(0.0, lambda: float(next(up)))) < unlimited


def test_a_plan_of_a_schedule_that_is_not_allowed_is_not_told(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    asked = replace(planning_problem(small_profile, small_cluster, 12), schedules=("zb-h1",))
    told: list[Plan | None] = []
    plan = find_plan(
        asked, "search", make_score(asked), on_step=lambda step: told.append(step.plan)
    )
    assert plan.schedule == "zb-h1"
    assert any(told)
    assert {one.schedule for one in told if one} == {"zb-h1"}


def hungry() -> ModelProfile:
    """Eight layers that save far more than they pass on."""
    work, size = Affine(0.1, 1.0), Affine(0.0, 1e6)
    layer = LayerCost("block", work, work, work, 10_000_000, saved_bytes=Affine(0.0, 20e6))
    edges = tuple(Edge(i, i + 1, f"x{i}", size, size) for i in range(7))
    return ModelProfile("hungry", (layer,) * 8, edges, batch_size=4)


def two_hosts(megabytes: float) -> Cluster:
    devices = (Device("gpu", megabytes * 1e6),) * 2
    return Cluster("two hosts", tuple(Host(n, devices, 1e9, 2e8) for n in ("a", "b")))


def test_data_parallelism_that_fits_only_by_block_is_planned_so() -> None:
    # Four bytes of state for each of 80 MB of parameters, 160 MB of activations of a row, 7 MB of
    # tensors between layers.
    ask = partial(plan_pipeline, hungry(), two_hosts(400), 16, planner="data-parallel")
    for recompute in ("auto", "blocks"):
        plan = ask(recompute=recompute)
        assert [stage.by_block for stage in plan.stages] == [True]
        assert plan.planner == "data-parallel"
    for recompute in ("stage", "on", "off"):
        with pytest.raises(Infeasible):
            ask(recompute=recompute)


@pytest.mark.parametrize(
    "megabytes", [300, *(pytest.param(m, marks=pytest.mark.slow) for m in (200, 400, 800))]
)
def test_search_is_no_slower_for_being_allowed_to_recompute_by_block(megabytes: float) -> None:
    profile, cluster = hungry(), two_hosts(megabytes)
    found = {}
    for recompute in ("auto", "stage", "blocks"):
        with suppress(Infeasible):
            plan = plan_pipeline(profile, cluster, 16, recompute=recompute)
            prediction = simulate_plan(plan, profile, cluster)
            assert prediction.fits
            found[recompute] = prediction.iteration_s
    assert found["auto"] <= min(found.values()) * 1.002


def test_where_no_schedule_can_recompute_by_block_the_reason_is_given() -> None:
    ask = partial(plan_pipeline, hungry(), two_hosts(400), 16, schedule="zb-h1")
    with pytest.raises(BadInput, match="zb-h1, which splits backwards"):
        ask(recompute="blocks")
    assert not any(stage.by_block for stage in ask(recompute="auto").stages)
