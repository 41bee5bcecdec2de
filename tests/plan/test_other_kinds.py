"""Times that were taken on another kind of device than the cluster's are told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import write_cluster
from penstock.plan.problem import PlanningProblem, other_kinds_words
from penstock.profile.find import find_profile
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import ModelProfile

SAID = "the times of profile 'small' are of cpu, and cluster 'gpus' counts A100-80GB as equally "


def cluster(*devices: Device) -> Cluster:
    return Cluster("gpus", (Host("a", devices, 1e9),))


@pytest.mark.parametrize(
    ("own", "kinds", "told"),
    [
        ("cpu", ("cpu",), ""),
        ("cpu", ("A100-80GB",), "counts A100-80GB as equally fast"),
        ("A100", ("A100-80GB",), ""),
        ("NVIDIA H100 80GB HBM3", ("H100",), ""),
        ("RTX4090-24GB", ("NVIDIA GeForce RTX 4090",), ""),
        ("T4-16GB", ("Tesla T4",), ""),
        ("V100-16GB", ("Tesla V100-SXM2-32GB",), "counts Tesla V100-SXM2-32GB as equally fast"),
        ("V100", ("V100-16GB", "A100-80GB", "T4"), "counts A100-80GB, T4 as equally fast"),
        ("", ("A100-80GB",), ""),
    ],
)
def test_kinds_are_compared_by_the_words_of_their_names(
    small_profile: ModelProfile, own: str, kinds: tuple[str, ...], told: str
) -> None:
    machines = cluster(*(Device(kind, 8e9) for kind in kinds))
    words = other_kinds_words(replace(small_profile, device=own), machines)
    assert told in words and bool(told) == bool(words)


def test_a_speed_that_is_given_is_believed(small_profile: ModelProfile) -> None:
    machines = cluster(Device("A100-80GB", 8e9, speed=3.0))
    assert other_kinds_words(replace(small_profile, device="cpu"), machines) == ""
    # CPUs have one name, so a slow one among them is no other kind.
    slow = cluster(Device("cpu", 8e9), Device("cpu", 8e9, speed=0.5))
    PlanningProblem(replace(small_profile, device="cpu"), slow, 4, (4,))


def test_built_in_models_name_their_device() -> None:
    assert find_profile("bert-48").device == "V100"
    assert find_profile("bert-32").device == "A100"


@pytest.mark.parametrize(
    "command",
    [["plan", "--planner", "single-device"], ["compare", "--planners", "single-device"]],
)
def test_planning_for_another_kind_says_so(
    penstock: Callable[..., Any], tmp_path: Path, small_profile: ModelProfile, command: list[str]
) -> None:
    profile = replace(small_profile, device="cpu", notes=("machine busy",))
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    write_cluster(cluster(Device("A100-80GB", 80e9)), tmp_path / "gpus.toml")
    name, *options = command
    problem = [tmp_path / "profile.json", "--cluster", tmp_path / "gpus.toml", "--batch", "4"]
    answer = penstock(name, *problem, *options)
    assert answer.code == 0 and SAID in answer.errors.splitlines()[0]
    assert SAID not in penstock(name, *problem, *options, "--quiet").errors
