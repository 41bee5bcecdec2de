"""Ranks measure and train in the same processes: that changes no result, and failures are named."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from host_jobs import PENSTOCK, started_ranks
from small_runs import TWO_STAGES, rows_of, train
from training_jobs import job_file

from penstock.errors import BadInput
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage

pytestmark = pytest.mark.timeout(180)

WHY = "job 'small': building the model raised ValueError in "


def test_ranks_that_have_measured_train_as_others_do_to_the_last_bit(tmp_path: Path) -> None:
    measured = train(tmp_path / "measured").run_directory
    known = train(tmp_path / "known", costs=measured).run_directory
    found, others = (
        [row[key] for row in rows_of(run) for key in ("loss", "evaluation_loss") if key in row]
        for run in (measured, known)
    )
    assert found == others
    assert len(found) == 8


def test_a_run_keeps_the_plan_for_each_number_of_ranks(tmp_path: Path) -> None:
    train(tmp_path, steps=4)
    other = Plan((Stage(range(0, 4), (0,), (4,)),), 4, 4, "1f1b")
    run = tmp_path / "run"
    write_plan(other, run / "plan-1.json")
    write_plan(other, run / "plan.json")
    train(tmp_path, plan=None, resume=True)
    assert read_plan(run / "plan.json") == read_plan(run / "plan-2.json") == TWO_STAGES


def test_a_rank_that_fails_while_all_measure_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=WHY):
        train(tmp_path, model="build_but_on_rank_one")


@pytest.mark.slow
def test_a_rank_that_torchrun_has_started_says_alone_why_it_fails(tmp_path: Path) -> None:
    job = job_file(tmp_path, model="build_but_on_rank_one")
    command = ("train", job, "-o", tmp_path / "run")
    (first, silent), (second, said) = started_ranks(command, command)
    assert "error" not in silent
    assert f"penstock: error: rank 1 on host '{socket.gethostname()}': {WHY}" in said
    assert (first, second) == (4, 2)


def test_sigterm_ends_a_run_at_once_that_has_not_trained(tmp_path: Path) -> None:
    job, run = job_file(tmp_path, model="build_for_ever"), tmp_path / "run"
    process = subprocess.Popen(
        [PENSTOCK, "train", str(job), "--workers", "2", "-o", str(run)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not all((tmp_path / f"building-{rank}").exists() for rank in range(2)):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "there is no checkpoint yet; --resume --out" in said
    assert "error" not in said


def test_ctrl_c_while_torch_is_imported_says_one_word(tmp_path: Path) -> None:
    """A terminal sends it to the command and to the server that imports torch beside it."""
    process = subprocess.Popen(
        [PENSTOCK, "train", "-o", str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def server_runs() -> bool:
        commands = (Path(f"/proc/{child}/cmdline") for child in children.read_text().split())
        return any(b"forkserver" in command.read_bytes() for command in commands)

    try:
        while not server_runs():
            # At once: the command may still be starting the server.
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.removeprefix("loading PyTorch\n") == "penstock: interrupted\n"
