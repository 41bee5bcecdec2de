"""Pins: what they say, what they contradict, and that plans keep them and are good ones."""

import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems

from penstock.advice.plan_pipeline import plan_pipeline
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput, Infeasible
from penstock.plan.json_file import read_plan
from penstock.plan.pins import read_pins
from penstock.plan.plan import Plan
from penstock.planners.find_plan import find_plan
from penstock.planners.pinned import best_pinned
from penstock.planners.problem import planning_problem, with_pins
from penstock.planners.search.every_plan import every_placement, every_variant
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.score import make_score

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "profile-and-plan.md"

KEPT: dict[str, Callable[[Plan], bool]] = {
    "first: alone": lambda plan: plan.stages[0].layers == range(1),
    "last: alone": lambda plan: len(plan.stages[-1].layers) == 1,
    "0-1: together": lambda plan: 1 in plan.stages[0].layers,
    "1: stage 1": lambda plan: len(plan.stages) > 1 and 1 in plan.stages[1].layers,
    "last: devices 0": lambda plan: plan.stages[-1].devices == (0,),
    "stage 0: devices 1": lambda plan: plan.stages[0].devices == (1,),
    "stages: 2": lambda plan: len(plan.stages) == 2,
    "stages: equal": lambda plan: True,
    "micro-batch: 2": lambda plan: plan.micro_batch_size == 2,
}
"""Pins, and whether a plan keeps them, said in another way than the package does."""


def keeps(plan: Plan, pins: list[str]) -> bool:
    """Whether a plan keeps all of them; stages that are alone by a pin need not be equal."""
    if "stages: equal" in pins:
        first, end = "first: alone" in pins, len(plan.stages) - ("last: alone" in pins)
        sizes = [len(stage.layers) for stage in plan.stages[first:end]]
        if sizes and max(sizes) - min(sizes) > 1:
            return False
    return all(KEPT[pin](plan) for pin in pins)


@settings(max_examples=8, deadline=None)
@given(problem=problems(), pins=st.lists(st.sampled_from([*KEPT]), min_size=1, max_size=2))
def test_no_plan_of_a_small_problem_that_keeps_the_pins_is_faster(
    problem: Any, pins: list[str]
) -> None:
    free = replace(problem, as_fast=0.0)
    score = make_score(free)
    plans = (p for one in every_placement(free) for p in every_variant(free, one))
    kept = [plan for plan in plans if keeps(plan, pins)]
    best_s = min(map(score, kept), default=inf)
    try:
        pinned = with_pins(free, pins)
    except BadInput:
        assert not kept
        return
    try:
        found = find_plan(pinned, "search", make_score(pinned))
    except Infeasible:
        assert best_s == inf
        return
    assert keeps(found, pins)
    assert score(found) <= best_s * (1 + 1e-9)


def test_more_stages_than_devices_are_refused_where_each_needs_its_own(
    small_profile: ModelProfile,
) -> None:
    """It crashed."""
    one = Cluster("one", (Host("h", (Device("cpu", 1e9),), 1e8),))
    problem = planning_problem(small_profile, one, 16, schedule="1f1b", pins=["stages: 2"])
    with pytest.raises(Infeasible, match="no plan that keeps pin 'stages: 2' fits"):
        find_plan(problem, "search", make_score(problem))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "chimera", "zero-bubble"])
def test_plans_of_every_kind_of_schedule_keep_pins(
    small_profile: ModelProfile, small_cluster: Cluster, schedule: str
) -> None:
    pins = ["head <loss>: alone", "blocks.0: stage 1", "stages: 4"]
    problem = planning_problem(
        small_profile, small_cluster, 16, micro_batch_size=4, schedule=schedule, pins=pins
    )
    plan = best_pinned(problem, make_score(problem))
    assert (plan.schedule, len(plan.stages)) == (schedule, 4)
    assert plan.stages[-1].layers == range(7, 8) and 1 in plan.stages[1].layers


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        (["blocks: stage 1", "embedding: stage 2"], "'embedding: stage 2' cannot be kept"),
        (["last: alone", "6-7: together"], "'last: alone' and '6-7: together' contradict"),
        (["stages: 2", "stages: 3"], "'stages: 2' and 'stages: 3' contradict each other"),
        (["micro-batch: 4", "micro-batch: 2"], "'micro-batch: 2' contradict each other"),
        (["stages: 9"], "pin 'stages: 9' cannot be kept with 8 layers on 4 devices"),
        (["first: devices 0", "last: devices 0,1"], "contradict each other"),
        (["micro-batch: 3"], "pin 'micro-batch: 3' is none of the sizes"),
        (["stage 1: devices 4"], "cluster 'four' has devices 0 to 3"),
        (["lm_head: alone"], "profile 'small' has no layer 'lm_head'"),
        (["0,2: alone"], "but not layer 1 ('blocks.0') between them; name neighbours"),
        (["first: somewhere"], "cannot be read; write 'LAYERS: alone'"),
        (["none.toml"], "none.toml"),
    ],
)
def test_a_pin_that_cannot_be_kept_is_named(
    small_profile: ModelProfile, small_cluster: Cluster, pins: list[str], told: str
) -> None:
    with pytest.raises(BadInput) as refused:
        planning_problem(small_profile, small_cluster, 16, pins=read_pins(pins))
    assert told in str(refused.value)


def test_a_planner_that_keeps_no_pins_and_a_pin_that_does_not_fit_are_named(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    with pytest.raises(Infeasible, match="'data-parallel' proposes no plan that keeps pin 'stages"):
        plan_pipeline(small_profile, small_cluster, 16, planner="data-parallel", pins=["stages: 3"])
    small = Cluster("small", (Host("h", (Device("cpu", 20e6),) * 4, 1e8, 1e-4),))
    with pytest.raises(Infeasible, match=r"keeps pin 'blocks: together' fits .* without it"):
        plan_pipeline(
            small_profile,
            small,
            16,
            recompute="off",
            sharding="off",
            pins=["blocks: together", "micro-batch: 4"],
        )


def test_the_commands_of_the_guide_run(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    (command,) = re.findall(r"^penstock (plan .+ --pin .+)$", text, re.MULTILINE)
    (file,) = re.findall(r"^# pins.toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "pins.toml").write_text(file, encoding="utf-8")
    answer = penstock(
        *shlex.split(command), *shlex.split("--schedule 1f1b --pin pins.toml --quiet")
    )
    assert answer.code == 0, answer.errors
    plan = read_plan("pinned.json")
    assert len(plan.stages) == 4 and plan.stages[-1].layers == range(25, 26)
    assert plan.stages[0].layers.stop > 3 and plan.stages[0].devices == (0, 1)


def test_groups_with_several_stages_have_equal_work_beside_a_pinned_stage(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    block = small_profile.layers[1]
    layers = (*(replace(block, name=f"blocks.{i}") for i in range(12)), small_profile.layers[0])
    profile = ModelProfile("even", layers, batch_size=4)
    pins = ["last: alone", "stages: 8"]
    problem = planning_problem(
        profile, small_cluster, 16, micro_batch_size=2, schedule="interleaved", pins=pins
    )
    plan = best_pinned(problem, make_score(problem))
    work = Counter[tuple[int, ...]]()
    for stage in plan.stages[:-1]:
        work[stage.devices] += len(stage.layers)
    assert len(plan.stages[-1].layers) == 1 and len(set(work.values())) == 1
