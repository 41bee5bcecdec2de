"""Where optimizers have their state: a choice of the plan for all its stages."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from penstock.advice.assessment import assess_plan, baselines_of
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import write_cluster
from penstock.costs.lower_bound import lower_bound_s
from penstock.errors import BadInput, Infeasible
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import plan_words
from penstock.plan.problem import PlanningProblem, StateChoice
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.runtime.tables import Constraints
from penstock.simulate.score import host_bytes, make_score, predict_plan
from penstock.text import seconds_text
from penstock.train.job import Job
from penstock.train.plan_job import training_problem

MEGABYTE = 1_000_000
PARAMETERS = 100 * MEGABYTE
STATE = 2.0
ON_DEVICE_S, ON_HOST_S = 1e-11, 2e-10


def profile(device: str = "some GPU", on_host_s: float = ON_HOST_S) -> ModelProfile:
    """Four equal layers."""
    layer = LayerCost(
        "layer",
        forward_s=Affine(0.0, 0.01),
        backward_input_s=Affine(0.0, 0.01),
        backward_weight_s=Affine(0.0, 0.01),
        parameter_bytes=PARAMETERS,
        saved_bytes=Affine(0.0, MEGABYTE),
    )
    return ModelProfile(
        "four",
        tuple(replace(layer, name=f"layer.{n}") for n in range(4)),
        tuple(Edge(n, n + 1, f"out.{n}", Affine(0.0, 1e3), Affine(0.0, 1e3)) for n in range(3)),
        batch_size=8,
        step_s_per_byte=ON_DEVICE_S,
        host_step_s_per_byte=on_host_s,
        device=device,
    )


def cluster(megabytes: float, devices: int = 2) -> Cluster:
    own = tuple(Device("some GPU", megabytes * MEGABYTE) for _ in range(devices))
    return Cluster("two", (Host("one", own, 1e10),))


def problem(megabytes: float, state_on: StateChoice, **more: object) -> PlanningProblem:
    return planning_problem(
        profile(),
        cluster(megabytes),
        8,
        micro_batch_size=1,
        schedule="1f1b",
        memory_reserve=0.0,
        optimizer_bytes_per_parameter_byte=STATE,
        state_on=state_on,
        **more,  # type: ignore[arg-type]
    )


def test_a_plan_that_needs_the_memory_of_hosts_is_found() -> None:
    """Two layers a device take 800 MB with their state, and 400 without."""
    with pytest.raises(Infeasible):
        small = problem(500, "device", sharding="off")
        find_plan(small, "search", make_score(small))
    own = problem(500, "auto", sharding="off")
    plan = find_plan(own, "search", make_score(own))
    assert plan.state_on == "host"
    assert predict_plan(own, plan).fits
    assert "optimizer state in host memory" in plan_words(plan)


def test_where_memory_is_ample_the_state_stays() -> None:
    own = problem(5000, "auto")
    assert find_plan(own, "search", make_score(own)).state_on == "device"


@pytest.mark.parametrize("planner", ["search", "dapple"])
def test_host_is_a_choice_for_all_planners(planner: str) -> None:
    own = problem(5000, "host")
    score = make_score(own)
    plan = find_plan(own, planner, score)
    assert plan.state_on == "host"
    assert lower_bound_s(own) <= score(plan) == predict_plan(own, plan).iteration_s


def test_what_it_saves_and_costs() -> None:
    """Without replicas, each device has its layers' state less and steps its layers longer."""
    own = problem(5000, "host", planner="search", pins=("stages: 2",))
    plan = find_plan(own, "search", make_score(own))
    planned = assess_plan(plan, own, baselines_of(own, make_score(own)))
    price = planned.on_host
    assert price is not None
    held = {s.devices[0]: len(s.layers) * PARAMETERS for s in plan.stages}
    assert price.less_bytes == pytest.approx([STATE * held[d] for d in (0, 1)])
    assert 0 < price.seconds <= max(held.values()) * (ON_HOST_S - ON_DEVICE_S) * (1 + 1e-9)
    assert f"{price}".endswith("up to 400 MB less on a device, 38.0 ms more")


def test_what_is_no_optimizers_stays_on_the_devices() -> None:
    own = replace(problem(5000, "host"), kept_on_device=0.5)
    plan = find_plan(own, "search", make_score(own))
    more = predict_plan(own, plan).peak_memory_bytes
    less = predict_plan(replace(own, kept_on_device=0.0), plan).peak_memory_bytes
    assert min(a - b for a, b in zip(more, less, strict=True)) >= 0.5 * PARAMETERS


def test_a_profile_that_does_not_know_is_refused() -> None:
    own = replace(problem(5000, "host"), profile=profile(on_host_s=0.0))
    with pytest.raises(BadInput, match="does not say how long an optimizer's step in host memory"):
        find_plan(own, "search", make_score(own))
    free = replace(own, state_on="auto")
    assert find_plan(free, "search", make_score(free)).state_on == "device"


def host_of(megabytes: float, room_megabytes: float) -> Cluster:
    (host,) = cluster(megabytes).hosts
    return Cluster("two", (replace(host, memory_bytes=room_megabytes * MEGABYTE),))


def test_a_plan_must_fit_the_memory_of_its_host() -> None:
    """Weights, gradients and state of 400 MB of parameters are 1.6 GB, and twice that for DDP."""
    ample = replace(problem(5000, "host", sharding="off"), micro_batch_sizes=(4,))
    free = find_plan(ample, "search", make_score(ample))
    assert len(free.device_groups) == 1
    assert host_bytes(ample, free) == [2 * 4 * PARAMETERS * (2 + STATE)]
    one_copy = replace(ample, cluster=host_of(5000, 1600))
    plan = find_plan(one_copy, "search", make_score(one_copy))
    assert host_bytes(one_copy, plan) == [1.6e9]
    assert make_score(one_copy)(free) == inf
    less = replace(ample, cluster=host_of(5000, 1599))
    with pytest.raises(Infeasible, match=r"takes 1\.60 GB .* cluster 'two' have 1\.60 GB"):
        find_plan(less, "search", make_score(less))
    stays = replace(less, state_on="auto")
    assert find_plan(stays, "search", make_score(stays)).state_on == "device"
    small = replace(stays, cluster=host_of(500, 1599))
    with pytest.raises(Infeasible, match="key memory"):
        find_plan(small, "search", make_score(small))


def test_plan_and_compare_have_rows_for_each_way(
    tmp_path: Path, penstock: Callable[..., Any]
) -> None:
    write_profile(profile(), tmp_path / "profile.json")
    write_cluster(cluster(500), tmp_path / "two.toml")
    inputs = [f"{tmp_path}/profile.json", "--cluster", f"{tmp_path}/two.toml", "--batch", "8"]
    inputs += ["--sharding", "off", "--optimizer-state", "auto"]
    for command in (["plan", *inputs], ["compare", *inputs, "--planners", "search"]):
        shown = penstock(*command).output.splitlines()
        told = json.loads(penstock(*command, "--json").output)
        assert [way["name"] for way in told["best_plans"]] == [
            "best plan, optimizer state on the cards",
            "best plan, optimizer state in host memory",
        ]
        rows = {re.split(r"  +", line)[0]: re.split(r"  +", line.rstrip()) for line in shown}
        assert rows["best plan, optimizer state on the cards"][1:] == ["does not fit"]
        best = rows["best plan, optimizer state in host memory"]
        assert best[1] == seconds_text(told["best_plans"][1]["iteration_s"])
        assert rows["DDP"][1:] == ["does not fit"]
        for name in ("naive split, one card at a time", "FSDP, optimizer state in host memory"):
            assert name in rows


def test_on_a_cpu_it_changes_nothing() -> None:
    own = replace(problem(5000, "host"), profile=profile("cpu"))
    plan = find_plan(own, "search", make_score(own))
    assert predict_plan(own, plan) == predict_plan(replace(own, state_on="device"), plan)


def test_files_keep_it(tmp_path: Path) -> None:
    own = problem(5000, "host")
    plan = find_plan(own, "search", make_score(own))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    write_profile(own.profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == own.profile


def test_the_command_line_prints_it(tmp_path: Path, penstock: Callable[..., Any]) -> None:
    write_profile(profile(), tmp_path / "profile.json")
    write_cluster(cluster(500), tmp_path / "two.toml")
    here = str(tmp_path)
    asked = ["plan", f"{here}/profile.json", "--cluster", f"{here}/two.toml", "--batch", "8"]
    asked += ["--sharding", "off", "--optimizer-state", "auto", "--schedule", "1f1b"]
    shown = penstock(*asked, "-o", f"{here}/plan.json").output
    assert "optimizer state in host memory: up to 400 MB less on a device" in shown
    told = json.loads(penstock(*asked, "--json").output)
    assert told["state_on"] == "host"
    assert max(told["host_state_saves_bytes"]) == pytest.approx(4e8)
    simulated = json.loads(penstock("simulate", f"{here}/plan.json", "--json").output)
    assert simulated["iteration_s"] == pytest.approx(told["iteration_s"])
    assert simulated["host_state_costs_s"] == pytest.approx(told["host_state_costs_s"])


def test_a_job_asks_for_it_by_a_constraint() -> None:
    own = Job("small", model=nn.Identity, data=lambda *asked: iter(()))
    assert own.update.state_on == "device"
    job = replace(own, constraints=Constraints(state_on="host"))
    assert job.update.state_on == "host"
    assert training_problem(problem(5000, "device"), job).state_on == "host"
