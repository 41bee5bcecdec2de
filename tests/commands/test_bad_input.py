"""Input that cannot be used: one line that names it and the remedy, and the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands.refusals import Penstock, refused


def test_a_missing_file_is_named(penstock: Penstock, cluster: Path, tmp_path: Path) -> None:
    answer = penstock("plan", tmp_path / "none.json", "--cluster", cluster, "--batch", 12)
    refused(answer, 2, "none.json' does not exist", "check the path")
    refused(penstock("simulate", tmp_path / "none.json"), 2, "plan", "does not exist")


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("four.toml", "link_bandwidth", "link_bandwith", ["link_bandwith", "'link_bandwidth'?"]),
        ("four.toml", "", "name = \n", ["four.toml' is not valid TOML", "line 1"]),
        ("profile.json", "", '{\n  "format": \n}', ["profile.json' is not valid JSON", "line 3"]),
    ],
)
def test_a_damaged_file_is_named_with_the_place(
    penstock: Penstock, problem: list[str], tmp_path: Path, file: str, old: str, new: str, told: Any
) -> None:
    place = tmp_path / file
    place.write_text(place.read_text().replace(old, new) if old else new)
    refused(penstock("plan", *problem), 2, file, *told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--micro-batch", 5], ["micro-batch size 5", "12", "[1, 2, 3, 4, 6, 12]"]),
        (["--batch", 0], ["0"]),
        (["--batch", -3], ["-3"]),
        (["--batch", 720720000], ["720720000 samples", "at most 10000000"]),
        (["--batch", 10**20], [f"{10**20} samples", "at most 10000000"]),
        (["--cluster", "dapple-z"], ["dapple-z", "dapple-a"]),
        (["-o", "no/plan.json"], ["cannot write", "name another place"]),
    ],
)
def test_a_problem_that_cannot_be_is_refused_with_the_remedy(
    penstock: Penstock, problem: list[str], options: list[object], told: list[str]
) -> None:
    refused(penstock("plan", *problem, *options), 2, *told)


def test_a_plan_for_more_devices_than_the_cluster_has_is_refused(
    penstock: Penstock, run_directory: Path, tmp_path: Path
) -> None:
    two = tmp_path / "two.toml"
    text = (run_directory / "cluster.toml").read_text()
    two.write_text(text.replace("count = 4", "count = 2"))
    answer = penstock("simulate", run_directory / "plan.json", "--cluster", two)
    refused(answer, 2, "device 3", "2 devices", "at least 4")


def test_a_plan_of_another_model_is_refused(
    penstock: Penstock, run_directory: Path, profile: Path
) -> None:
    plan = json.loads((run_directory / "plan.json").read_text())
    plan["stages"][-1]["layers"] = [7, 12]
    (run_directory / "plan.json").write_text(json.dumps(plan))
    refused(penstock("simulate", run_directory / "plan.json"), 2, "[0, 12)", "8 layers")


def test_a_model_too_big_for_the_memory_ends_with_3_and_a_remedy(
    penstock: Penstock, problem: list[str], cluster: Path
) -> None:
    cluster.write_text(cluster.read_text().replace("60000000.0", "3000000.0"))
    few = {"plan": ("--planner", "dapple"), "compare": ("--planners", "dapple,spp")}
    for command, planners in few.items():
        answer = penstock(command, *problem, "--quiet", *planners)
        refused(answer, 3, "no plan fits", "on device", "use devices with")


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [("planner", "serch", "search"), ("schedule", "1F1B", "1f1b"), ("schedule", "gpip", "gpipe")],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    penstock: Penstock, problem: list[str], option: str, given: str, meant: str
) -> None:
    answer = penstock("plan", *problem, f"--{option}", given)
    refused(answer, 2, f"{option} '{given}' is unknown", f"did you mean '{meant}'?")
    refused(penstock("compare", *problem, f"--{option}s", given), 2, f"did you mean '{meant}'?")


def test_a_pipedream_text_without_its_batch_is_refused(
    penstock: Penstock, tmp_path: Path, cluster: Path
) -> None:
    text = tmp_path / "graph.txt"
    text.write_text("node1 -- a -- forward_compute_time=1.0, backward_compute_time=2.0, ")
    answer = penstock("plan", text, "--cluster", cluster, "--batch", 12)
    refused(answer, 2, "--profile-batch")


def test_a_run_directory_that_is_none_is_refused(penstock: Penstock, tmp_path: Path) -> None:
    refused(penstock("report", tmp_path / "none"), 2, "none' does not exist", "penstock train")
    refused(penstock("report", tmp_path), 2, "has no plan.json", "penstock train")


def test_a_plan_without_profile_or_cluster_is_refused_with_the_option_to_give(
    penstock: Penstock, run_directory: Path
) -> None:
    (run_directory / "profile.json").unlink()
    refused(penstock("simulate", run_directory / "plan.json"), 2, "--profile")


@pytest.mark.parametrize(
    "arguments",
    [["plan"], ["plan", "x", "--bach", "3"], ["pln"], ["plan", "x", "--batch", "many"], ["--jso"]],
)
def test_wrong_usage_ends_with_2_and_names_the_help(
    penstock: Penstock, arguments: list[str]
) -> None:
    refused(penstock(*arguments), 2, "--help'")


def test_a_damaged_prediction_is_refused_with_the_way_round_it(
    penstock: Penstock, run_directory: Path
) -> None:
    (run_directory / "plan.predicted.json").write_text('{"format": "else"}')
    refused(penstock("simulate", run_directory / "plan.json"), 2, "delete it", "--profile")


def test_a_plan_of_too_many_micro_batches_is_refused_at_once(
    penstock: Penstock, run_directory: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    given = json.loads((run_directory / "plan.json").read_text())
    plan.write_text(json.dumps({**given, "micro_batches": 10**12}))
    costs = ["--profile", run_directory / "profile.json"]
    costs += ["--cluster", run_directory / "cluster.toml"]
    answer = penstock("simulate", plan, *costs)
    refused(answer, 2, "1000000000000 micro-batches", "at most 65536")
    plan.write_text(json.dumps(given))
    answer = penstock("simulate", plan, *costs, "--micro-batches", 10**20)
    refused(answer, 2, "100000000000000000000 micro-batches", "at most 65536")
