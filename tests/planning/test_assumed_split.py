"""What is said of plans that split backwards where the profile does not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.toml_file import find_cluster
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planning.answers import find_plan
from penstock.planning.assumed_split import assumed_split, with_input_share
from penstock.planning.planning_problem import planning_problem
from penstock.profile.find import find_profile
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import ModelProfile
from penstock.profile.pipedream_text import parse_pipedream
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

TWO_NODES = """\
node1 -- a -- forward_compute_time=1, backward_compute_time=3, activation_size=8, parameter_size=4
node2 -- b -- forward_compute_time=1, backward_compute_time=3, activation_size=8, parameter_size=4
\tnode1 -- node2
"""


def bert(schedule: str) -> tuple[PlanningProblem, Plan]:
    problem = planning_problem(
        find_profile("bert-48"), find_cluster("dapple-b"), 64, schedule=schedule, micro_batch_size=2
    )
    return problem, find_plan(problem, "gpipe", make_score(problem))


def test_readers_of_one_time_for_a_backward_say_so_and_files_keep_it(tmp_path: Path) -> None:
    read = parse_pipedream(TWO_NODES, "two.txt", 1)
    assert read.halves_assumed and find_profile("bert-48").halves_assumed
    write_profile(read, tmp_path / "two.json")
    assert read_profile(tmp_path / "two.json") == read


@pytest.mark.parametrize("share", [1 / 3, 2 / 3])
def test_other_splits_are_played_with_the_same_order(share: float) -> None:
    problem, plan = bert("zb-h1")
    split = assumed_split(problem, plan, make_score(problem)(plan))
    assert split is not None
    layers = problem.profile.layers
    changed = with_input_share(problem.profile, share)
    for layer, other in zip(layers, changed.layers, strict=True):
        whole_s = layer.backward_s.at(2)
        assert other.backward_s.at(2) == pytest.approx(whole_s)
        assert other.backward_input_s.at(2) == pytest.approx(share * whole_s)
    told = dict(split.others)[share]
    assert told == simulate_plan(plan, changed, problem.cluster).iteration_s != split.iteration_s
    as_assumed = with_input_share(problem.profile, 0.5)
    played_s = simulate_plan(plan, as_assumed, problem.cluster).iteration_s
    assert played_s == pytest.approx(split.iteration_s)


def test_nothing_is_said_where_the_split_is_known_or_plays_no_part() -> None:
    problem, plan = bert("zb-h1")
    measured = replace(problem, profile=replace(problem.profile, halves_assumed=False))
    assert assumed_split(measured, plan, 1.0) is None
    assert assumed_split(*bert("1f1b"), 1.0) is None


def test_the_answer_and_its_explanation_say_it(
    penstock: Callable[..., Any], tmp_path: Path, small_profile: ModelProfile
) -> None:
    place = tmp_path / "profile.json"
    write_profile(replace(small_profile, halves_assumed=True), place)
    asked = ("plan", place, "--cluster", "graph-8", "--batch", 12, "--planner", "gpipe")
    split = penstock(*asked, "--schedule", "zb-h1", "--explain")
    assert "half of it is assumed to be for the inputs; the same plan takes" in split.output
    assert "No plan with whole backwards, one stage a device takes less than" in split.output
    values = json.loads(penstock(*asked, "--schedule", "zb-h1", "--json").output)
    assert [other["input_share"] for other in values["assumed_split"]["others"]] == [1 / 3, 2 / 3]
    assert "assumed" not in penstock(*asked, "--schedule", "1f1b").output
