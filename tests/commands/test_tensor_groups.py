"""Commands with plans whose devices are tensor groups."""

from pathlib import Path

import pytest
from commands.refusals import Penstock, refused
from planners.test_tensor_groups import host_of, large_block

from penstock.cluster.toml_file import write_cluster
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage
from penstock.profile.json_file import write_profile

RANKS = [[0, 1], [2, 3], [4]]


@pytest.fixture
def planning(tmp_path: Path) -> list[object]:
    """The arguments of `plan` for the large block on five devices."""
    write_profile(large_block(), tmp_path / "profile.json")
    write_cluster(host_of(5), tmp_path / "cluster.toml")
    cluster = ["--cluster", tmp_path / "cluster.toml"]
    return ["plan", tmp_path / "profile.json", *cluster, "--batch", 16, "--micro-batch", 2]


def test_a_plan_with_groups_is_written_shown_and_simulated(
    penstock: Penstock, planning: list[object], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    without = penstock(*planning, "--json").values
    found = penstock(*planning, "--tensor-parallel", "2", "-o", plan, "--explain", "--json").values
    assert found["tensor_groups"] == RANKS and "tensor_groups" not in without
    assert found["iteration_s"] < 0.92 * without["iteration_s"]
    # One device is a device of the cluster, not a group.
    assert found["speedup_over_one_device"] * found["iteration_s"] == pytest.approx(
        without["speedup_over_one_device"] * without["iteration_s"]
    )
    assert read_plan(plan).tensor_groups == ((0, 1), (2, 3), (4,))
    again = penstock("simulate", plan, "--json").values
    assert again["iteration_s"] == found["iteration_s"] and again["tensor_groups"] == RANKS
    other = penstock("simulate", plan, "--schedule", "gpipe", "--iterations", "2")
    assert "tensor groups: device 0 is ranks 0, 1; device 1 is ranks 2, 3;" in other.output
    assert "with schedule gpipe" in other.output


def test_a_time_limit_is_shared_by_the_ways_to_group(
    penstock: Penstock, planning: list[object]
) -> None:
    found = penstock(*planning, "--tensor-parallel", "2,4", "--time-limit", "2", "--json").values
    assert found["iteration_s"] > 0


@pytest.mark.parametrize("sizes", ["two", "0", "2;4", "2,,4", "65", "-2"])
def test_sizes_that_are_none_are_refused(
    penstock: Penstock, planning: list[object], sizes: str
) -> None:
    answer = penstock(*planning, f"--tensor-parallel={sizes}")
    assert answer.code == 2
    assert f"tensor groups '{sizes}' must be numbers of ranks from 1 to 64" in answer.errors


def test_a_profile_that_does_not_say_what_is_divided_is_refused(
    penstock: Penstock, tmp_path: Path
) -> None:
    write_cluster(host_of(2), tmp_path / "cluster.toml")
    answer = penstock(
        *("plan", "vgg-16", "--cluster", tmp_path / "cluster.toml", "--batch", 4),
        *("--tensor-parallel", "2"),
    )
    assert answer.code == 2
    assert "profile 'vgg-16' does not say what a tensor group divides; add it" in answer.errors


def test_rehearsing_refuses_groups(
    penstock: Penstock, planning: list[object], tmp_path: Path
) -> None:
    stages = Stage(range(1), (0,), (2,)), Stage(range(1, 2), (1,), (2,))
    place = tmp_path / "groups.json"
    write_plan(Plan(stages, 2, 2, "1f1b", tensor_groups=((0, 1), (2,))), place)
    files = ["--profile", planning[1], "--cluster", planning[3]]
    refused(penstock("rehearse", place, *files), 2, "the plan has tensor groups")
