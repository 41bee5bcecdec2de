from dataclasses import replace
from itertools import count
from math import inf

import pytest

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.planning.answers import plan_pipeline, score_until
from penstock.planning.questions import planning_problem
from penstock.profile.model_profile import ModelProfile
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


@pytest.mark.parametrize("option", [{"planner": "dynamic"}, {"schedule": "one"}])
def test_an_unknown_name_is_refused(
    small_profile: ModelProfile, small_cluster: Cluster, option: dict[str, str]
) -> None:
    with pytest.raises(BadInput, match="is unknown; there are"):
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
