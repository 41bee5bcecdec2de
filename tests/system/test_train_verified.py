"""The first step of a job is compared with its model; records tell, and a wrong run ends."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import TWO_STAGES, rows_of
from training_jobs import job_file

from penstock.plan.json_file import write_plan

pytestmark = pytest.mark.timeout(280)

EQUAL = "equal to your module on the whole batch: loss "


def train(job: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What ``penstock train --json`` says."""
    plan = job.parent / "plan.json"
    write_plan(TWO_STAGES, plan)
    command = ["train", str(job), "--workers", "2", "--plan", str(plan), "--out", str(out)]
    call = [sys.executable, "-c", "from penstock.cli import main; main()", *command, "--json"]
    return subprocess.run([*call, *options], capture_output=True, text=True, check=False)


def test_a_new_run_says_in_every_record_that_its_first_step_is_right(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new = train(job_file(tmp_path, steps=2), run)
    verified = json.loads(new.stdout)["verified"]
    assert verified.startswith(EQUAL)
    assert f"step 1: {verified}" in new.stderr
    assert [(row["step"], row["verified"]) for row in rows_of(run) if "verified" in row] == [
        (1, verified)
    ]
    assert f'First step</td><td data-head="">{EQUAL}' in (run / "report.html").read_text()


def test_a_wrong_run_ends_before_it_trains(penstock: Callable[..., Any], tmp_path: Path) -> None:
    job, plan, out = (
        job_file(tmp_path, model="build_forked", steps=2),
        tmp_path / "plan.json",
        tmp_path / "refused",
    )
    write_plan(TWO_STAGES, plan)
    refused = penstock("train", job, "--workers", 2, "--plan", plan, "--out", out)
    assert refused.code == 4
    last = refused.errors.splitlines()[-1]
    assert "the first step is not that of your module, and nothing was trained: loss is " in last
    assert 'with verify = "off" (--no-verify)' in last
    assert not list((out / "checkpoints").glob("*"))


@pytest.mark.slow
def test_no_step_is_compared_without_being_the_first_or_where_it_is_off(tmp_path: Path) -> None:
    job, run = job_file(tmp_path, model="build_forked", steps=2), tmp_path / "run"
    for options in (["--no-verify"], ["--steps", "4", "--resume"]):
        result = train(job, run, *options)
        assert json.loads(result.stdout)["verified"] == ""
        assert "step 1: " not in result.stderr
