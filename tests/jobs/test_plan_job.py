"""Beside a job's plan stands what a step takes without a pipeline."""

from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.jobs.job_file import find_job
from penstock.jobs.plan_job import without_pipeline_words
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.simulation import simulate_plan
from penstock.words import seconds_text


def test_data_parallelism_is_predicted_beside_a_pipeline(
    small_profile: ModelProfile, small_cluster: Cluster, small_plan: Plan
) -> None:
    job = replace(find_job("gpt-text"), batch_size=12, micro_batch_sizes=(12,))
    two = small_cluster.first(2)
    half = Plan((Stage(range(0, 4), (0,), (12,)), Stage(range(4, 8), (1,), (12,))), 1, 12, "1f1b")
    alike = Plan((Stage(range(8), (0, 1), (6, 6)),), 1, 12, "1f1b")
    step_s = simulate_plan(alike, small_profile, two).iteration_s
    words = without_pipeline_words(job, half, small_profile, two)
    assert words == f"data parallelism over 2 workers would take {seconds_text(step_s)}"
    assert without_pipeline_words(job, alike, small_profile, two) == ""


def test_data_parallelism_without_room_is_no_choice(
    small_profile: ModelProfile, small_cluster: Cluster, small_plan: Plan
) -> None:
    job = replace(find_job("gpt-text"), batch_size=12, micro_batch_sizes=(2,))
    (host,) = small_cluster.hosts
    small = replace(host, devices=tuple(replace(d, memory_bytes=20e6) for d in host.devices))
    words = without_pipeline_words(job, small_plan, small_profile, Cluster("small", (small,)))
    assert words == "data parallelism does not fit in memory"
