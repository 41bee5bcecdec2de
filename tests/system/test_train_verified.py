"""The first step of a job is compared with its model; records tell, and a wrong run ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import TWO_STAGES, rows_of
from training_jobs import job_file

from penstock.plan.json_file import write_plan

pytestmark = pytest.mark.timeout(280)

EQUAL = "equal to your module on the whole batch: loss "


@pytest.fixture
def train(penstock: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """The answer of ``penstock train`` on two workers."""
    write_plan(TWO_STAGES, tmp_path / "plan.json")
    options = ("--workers", 2, "--plan", tmp_path / "plan.json", "--out", tmp_path / "run")
    return lambda job, *more: penstock("train", job, *options, *more)


def test_a_new_run_says_in_every_record_that_its_first_step_is_right(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    new = train(job_file(tmp_path, steps=2), "--json")
    verified = new.values["verified"]
    assert verified.startswith(EQUAL)
    assert f"step 1: {verified}" in new.errors
    assert [(row["step"], row["verified"]) for row in rows_of(run) if "verified" in row] == [
        (1, verified)
    ]
    assert f'First step</td><td data-head="">{EQUAL}' in (run / "report.html").read_text()


def test_a_wrong_run_ends_before_it_trains(train: Callable[..., Any], tmp_path: Path) -> None:
    refused = train(job_file(tmp_path, model="build_forked", steps=2))
    assert refused.code == 4
    last = refused.errors.splitlines()[-1]
    assert "the first step is not that of your module, and nothing was trained: loss is " in last
    assert 'with verify = "off" (--no-verify)' in last
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.slow
def test_no_step_is_compared_without_being_the_first_or_where_it_is_off(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    job = job_file(tmp_path, model="build_forked", steps=2)
    for options in (["--no-verify"], ["--steps", "4", "--resume"]):
        answer = train(job, *options, "--json")
        assert answer.values["verified"] == ""
        assert "step 1: " not in answer.errors
