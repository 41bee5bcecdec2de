"""Profiles and clusters that cannot be: one line with place, value and remedy, and the code."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands.refusals import Penstock, refused

CLUSTER = """
name = "pair"

[[hosts]]
name = "a"
count = 2
port_bandwidth = "10 Gb/s"

[[hosts.devices]]
kind = "small"
memory = "1 GB"
"""


def plan(penstock: Penstock, profile: object, *options: object) -> Any:
    """Plan by the fastest planner, on a preset where no cluster is among the options."""
    cluster = () if "--cluster" in options else ("--cluster", "bapipe-vcu118")
    return penstock("plan", profile, *cluster, "--batch", 8, "--planner", "single-device", *options)


def test_built_in_models_need_neither_file_nor_batch(penstock: Penstock, tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    made = penstock(
        *("plan", "vgg-16", "--cluster", "dapple-a", "--batch", 64),
        *("--planner", "data-parallel", "--json", "-o", place),
    )
    assert made.code == 0, made.errors
    played = penstock("simulate", place, "--json")
    assert json.loads(played.output)["iteration_s"] == json.loads(made.output)["iteration_s"]


def test_a_name_that_is_no_model_is_refused_with_the_nearest(penstock: Penstock) -> None:
    refused(plan(penstock, "bert48"), 2, "'bert48'", "xlnet-36", "did you mean 'bert-48'?")
    refused(plan(penstock, "bert-48", "--profile-batch", 2), 2, "leave out --profile-batch")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"10 Gb/s"', '"10 Gp/s"', ["port_bandwidth", "unknown unit 'Gp/s'", "Gb/s"]),
        ('"10 Gb/s"', '"0 Gb/s"', ["device 0 cannot reach device 1", "'a0'", "rate > 0"]),
        ('"10 Gb/s"', '"-1 Gb/s"', ["'a0'", "port_bandwidth", ">= 0"]),
        ('port_bandwidth = "10 Gb/s"', "", ["device 0 cannot reach device 1", "add the link"]),
        ('"1 GB"', '"1 Gb"', ["memory", "unknown unit 'Gb'"]),
        ('"1 GB"', '"0 GB"', ["'small'", "memory 0.0", "> 0"]),
        ('"1 GB"', "nan", ["memory nan", "> 0"]),
        ('name = "pair"', 'name = "pair"\nlinks = [{source = 0, target = 1}]', ["bandwidth"]),
        (
            'name = "pair"',
            'name = "pair"\nlinks = [{source = 0, target = 1, bandwidth = 0}]',
            ["link 0 -> 1", "rate 0", "leave the link out"],
        ),
        (
            'name = "pair"',
            'name = "pair"\nlinks = [{source = 0, target = 2, bandwidth = 1}]',
            ["link 0 -> 2", "0..1"],
        ),
    ],
)
def test_a_wrong_cluster_ends_with_2_and_names_host_or_link(
    penstock: Penstock, tmp_path: Path, old: str, new: str, told: list[str]
) -> None:
    cluster = tmp_path / "pair.toml"
    cluster.write_text(CLUSTER)
    assert plan(penstock, "vgg-16", "--cluster", cluster, "--micro-batch", 1).code == 3
    assert old in CLUSTER
    cluster.write_text(CLUSTER.replace(old, new, 1))
    refused(plan(penstock, "vgg-16", "--cluster", cluster), 2, "pair.toml", *told)


def test_more_stages_than_layers_are_refused(penstock: Penstock) -> None:
    refused(
        plan(penstock, "vgg-16", "--max-stages", 42), 2, "max_stages is 42", "41 layers", "1 to 41"
    )
    refused(plan(penstock, "vgg-16", "--max-stages", 0), 2, "--max-stages", "equal to 1")


def test_a_model_that_fits_no_plan_ends_with_3_and_what_would_do(penstock: Penstock) -> None:
    answer = penstock(
        *("plan", "bert-32", "--cluster", "small-memory", "--batch", 64, "--quiet"),
        *("--planner", "dynamic-program"),
    )
    refused(answer, 3, "no plan fits", "use >= 12 devices", "use devices with 4.525 GB")
