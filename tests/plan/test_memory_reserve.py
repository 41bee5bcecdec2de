"""Plans leave the reserve free; what does not fit beside it is said with what would."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.advice.plan_pipeline import plan_pipeline
from penstock.cluster.cluster import Cluster, Device, Host, with_memory_reserve
from penstock.cluster.toml_file import cluster_from_toml, write_cluster
from penstock.errors import BadInput, Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.problem import planning_problem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import simulate_plan

MB = 10**6
BATCH = 8


def chain(saved_mb: float) -> ModelProfile:
    """Four equal layers that keep so many megabytes of a sample, and 10 MB of state each."""
    saved, sent = Affine(0.0, saved_mb * MB), Affine(0.0, 0.1 * MB)
    second = Affine(0.0, 1e-3)
    layer = LayerCost("layer", second, second, second, 2 * MB + MB // 2, saved_bytes=saved)
    edges = tuple(Edge(i, i + 1, f"x{i}", sent, sent) for i in range(3))
    return ModelProfile("chain", (layer,) * 4, edges, batch_size=1)


def two_devices(memory_mb: float) -> Cluster:
    return Cluster("two", (Host("host", (Device("D", memory_mb * MB),) * 2, 1e9),))


def fullest(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """The largest share of a device's memory that a plan needs."""
    peaks = simulate_plan(plan, profile, cluster).peak_memory_bytes
    return max(p / d.memory_bytes for p, d in zip(peaks, cluster.devices, strict=True))


@pytest.mark.parametrize("planner", ["search", "dapple", "dynamic-program"])
def test_no_plan_uses_the_reserve(planner: str) -> None:
    # Two stages of 20 MB of state that keep 16 MB of each of one to three micro-batches.
    profile, cluster = chain(8), two_devices(74)
    full = plan_pipeline(profile, cluster, BATCH, planner=planner, memory_reserve=0.0)
    safe = plan_pipeline(profile, cluster, BATCH, planner=planner, memory_reserve=0.3)
    assert fullest(safe, profile, cluster) <= 0.7 < fullest(full, profile, cluster) <= 1.0


def test_the_default_leaves_a_twentieth_free_and_a_problem_by_itself_nothing() -> None:
    asked = planning_problem(chain(8), two_devices(100), BATCH)
    assert [device.memory_bytes for device in asked.cluster.devices] == [95 * MB] * 2
    assert [device.reserved_bytes for device in asked.cluster.devices] == [5 * MB] * 2
    cluster = two_devices(100)
    assert PlanningProblem(chain(8), cluster, BATCH, (1,)).cluster is cluster


def test_a_question_asked_again_keeps_its_reserve_free_once() -> None:
    asked = planning_problem(chain(8), two_devices(100), BATCH, memory_reserve=0.2)
    again = replace(asked, recompute="off")
    assert again.cluster.devices == asked.cluster.devices
    without = replace(asked, memory_reserve=0.0)
    assert without.cluster == two_devices(100)


def test_what_does_not_fit_beside_the_reserve_is_told_the_largest_that_would_do() -> None:
    # The leanest plan: a stage with 20 MB of state and 16 MB of one micro-batch.
    profile, cluster = chain(8), two_devices(37.5)
    ask = partial(
        plan_pipeline, profile, cluster, BATCH, planner="dynamic-program", recompute="stage"
    )
    with pytest.raises(Infeasible, match=r"33\.75 MB beside a memory reserve of 3\.75 MB") as told:
        ask(memory_reserve=0.1)
    found = re.search(r"keep only (\d+) % of each device's memory free \(--memory", str(told.value))
    assert found is not None
    percent = int(found[1])
    assert ask(memory_reserve=percent / 100)
    with pytest.raises(Infeasible):
        ask(memory_reserve=(percent + 1) / 100)


def test_the_memory_that_would_do_counts_the_reserve() -> None:
    ask = partial(plan_pipeline, chain(8), batch=BATCH, planner="dapple", memory_reserve=0.1)
    with pytest.raises(Infeasible) as told:
        ask(two_devices(30))
    found = re.search(r"use devices with ([\d.]+) MB", str(told.value))
    assert found is not None
    assert ask(two_devices(float(found[1])))
    with pytest.raises(Infeasible):
        ask(two_devices(0.98 * float(found[1])))


@pytest.mark.parametrize("share", [1.0, -0.1, float("nan")])
def test_a_reserve_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(BadInput, match="memory reserve"):
        planning_problem(chain(8), two_devices(100), BATCH, memory_reserve=share)


def test_a_cluster_is_written_with_all_its_memory(tmp_path: Path) -> None:
    write_cluster(with_memory_reserve(two_devices(100), 0.25), tmp_path / "two.toml")
    text = (tmp_path / "two.toml").read_text(encoding="utf-8")
    assert cluster_from_toml(text, "two.toml") == two_devices(100)
