"""What a job's plan takes, and beside it a step without a pipeline."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan, Stage, plan_words
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.tables import Constraints
from penstock.simulate.simulation import simulate_plan
from penstock.text import seconds_text
from penstock.train.job_file import find_job
from penstock.train.plan_job import (
    new_plan,
    other_words,
    pins_left_out,
    predict_iteration,
    problem_of,
)

JOB = replace(find_job("gpt-text"), batch_size=12, micro_batch_sizes=(12,))
FREE = replace(JOB, constraints=Constraints())
HALVES = Plan((Stage(range(0, 4), (0,), (12,)), Stage(range(4, 8), (1,), (12,))), 1, 12, "1f1b")


def test_data_parallelism_is_predicted_beside_a_pipeline(
    small_profile: ModelProfile, small_cluster: Cluster, small_plan: Plan
) -> None:
    two = small_cluster.first(2)
    alike = Plan((Stage(range(8), (0, 1), (6, 6)),), 1, 12, "1f1b")
    step_s = simulate_plan(alike, small_profile, two).iteration_s
    problem = problem_of(FREE, small_profile, two)
    words = other_words(FREE, HALVES, problem)
    assert words == f"DDP over 2 workers would take {seconds_text(step_s)}"
    assert other_words(FREE, alike, problem) == ""


def test_other_programs_slow_a_predicted_step_down(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    """The whole model on one device: its step is all work."""
    plan = Plan((Stage(range(8), (0,), (12,)),), 1, 12, "1f1b")
    idle_s, busy_s = (
        predict_iteration(
            FREE,
            plan,
            problem_of(FREE, replace(small_profile, other_load=load), small_cluster.first(1)),
        ).iteration_s
        for load in (0.0, 0.5)
    )
    assert busy_s == pytest.approx(1.5 * idle_s)


def test_data_parallelism_without_room_is_no_choice(
    small_profile: ModelProfile, small_cluster: Cluster, small_plan: Plan
) -> None:
    job = replace(FREE, micro_batch_sizes=(2,))
    (host,) = small_cluster.hosts
    small = replace(host, devices=tuple(replace(d, memory_bytes=20e6) for d in host.devices))
    problem = problem_of(job, small_profile, Cluster("small", (small,)))
    words = other_words(job, small_plan, problem)
    assert words == "DDP does not fit in memory"


def test_sums_in_float32_and_an_average_take_memory_as_the_weights_do(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    def peaks(**keys: object) -> list[float]:
        at = replace(JOB, **keys)  # type: ignore[arg-type]
        problem = problem_of(at, small_profile, small_cluster.first(2))
        return list(predict_iteration(at, HALVES, problem).peak_memory_bytes)

    own = [
        sum(layer.parameter_bytes for layer in small_profile.layers[part])
        for part in (slice(4), slice(4, 8))
    ]
    for keys in ({"gradient_dtype": "float32"}, {"average_decay": 0.9}):
        grown = [new - old for new, old in zip(peaks(**keys), peaks(), strict=True)]
        assert grown == own


def test_constraints_are_kept_and_the_best_plan_without_them_is_said(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    job = replace(JOB, micro_batch_sizes=(6, 12))
    four = problem_of(job, small_profile, small_cluster.first(4))
    plan = new_plan(job, four)
    assert plan.schedule == "1f1b"
    assert sorted(stage.devices for stage in plan.stages) == [(0,), (1,), (2,), (3,)]
    free = new_plan(replace(job, constraints=Constraints()), four)
    step_s = predict_iteration(job, free, four).iteration_s
    own = plan_words(free, "worker").partition(";")[0]
    said = other_words(job, plan, four)
    assert said == f"without constraints {own} would take {seconds_text(step_s)}"
    # Four stages are too many for the workers that are left.
    two = problem_of(job, small_profile, small_cluster.first(2))
    assert new_plan(job, two).schedule == "1f1b"
    assert pins_left_out(job, two) == ("stages: 4",) and not pins_left_out(job, four)
