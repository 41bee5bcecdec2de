"""Trackers get every row, and nothing that they do holds or ends a training.

Neither library is installed where this runs: `stand_ins` has modules with their signatures.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import BadInput
from penstock.jobs.job_file import find_job
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.tracking import sending
from penstock.runtime.tracking.registry import TRACKERS, check_installed
from penstock.runtime.tracking.sending import RowSender
from penstock.runtime.tracking.track import track
from penstock.runtime.tracking.tracked_run import TrackedRun

STAND_INS = Path(__file__).parent / "stand_ins"
BOTH = tuple(TRACKERS)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the stand-ins write what they were told."""
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "told.jsonl"


def calls(told: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    return [row for row in rows if row["call"] == name]


def run_in(folder: Path) -> TrackedRun:
    return TrackedRun("words", "first", str(folder / "trackers"), {"rate": 0.5})


@pytest.mark.parametrize("tracker", BOTH)
def test_rows_arrive_and_a_later_start_goes_on_with_the_run(
    told: Path, tmp_path: Path, tracker: str
) -> None:
    said: list[str] = []
    for steps in (range(1, 4), range(4, 6)):
        sender = RowSender(tracker, run_in(tmp_path), said.append)
        for step in steps:
            sender.send({"step": step, "loss": 1 / step})
        sender.close()
    assert said == []
    first, again = calls(told, "init")
    assert (first["project"], first["name"]) == ("words", "first")
    assert first["id"] == again["id"] == (tmp_path / f"trackers/{tracker}.id").read_text().strip()
    shown = [(row["step"], row["values"]) for row in calls(told, "log")]
    assert shown == [(step, {"loss": 1 / step}) for step in range(1, 6)]
    assert len(calls(told, "finish")) == 2
    # The settings are told once: neither library lets a run that goes on change them.
    starts = {"wandb": [first, again], "mlflow": calls(told, "params")}[tracker]
    configs = [start["config"] for start in starts]
    assert configs == {"wandb": [{"rate": 0.5}, None], "mlflow": [{"rate": 0.5}]}[tracker]


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_left_out_with_one_line(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("TROUBLE", place)
    said: list[str] = []
    sender = RowSender("wandb", run_in(tmp_path), said.append)
    until = time.monotonic() + (0.0 if place == "finish" else 60.0)
    sender.send({"step": 1, "loss": 1.0})
    while not said and time.monotonic() < until:
        sender.send({"step": 2, "loss": 1.0})
        time.sleep(0.02)
    sender.close()
    sender.send({"step": 3, "loss": 1.0})
    sender.close()
    assert len(said) == 1
    assert "tracker 'wandb' has failed" in said[0]
    assert f"ConnectionError: the server is away ({place})" in said[0]
    assert "the run goes on without it" in said[0]
    assert "wandb: a banner" in (tmp_path / "trackers/wandb.log").read_text()


def test_a_tracker_that_hangs_holds_a_run_only_for_a_limited_time_at_its_end(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", "hang")
    monkeypatch.setattr(sending, "FINISH_S", 1.0)
    said: list[str] = []
    sender = RowSender("wandb", run_in(tmp_path), said.append)
    assert sender._process is not None
    process, start_s = sender._process, time.monotonic()
    for step in range(20_000):
        sender.send({"step": step, "loss": 1.0})
    assert time.monotonic() - start_s < 10.0
    assert said == []
    start_s = time.monotonic()
    sender.close()
    assert time.monotonic() - start_s < 5.0
    assert process.returncode == -signal.SIGKILL
    (line,) = said
    assert "has not taken the last values within 1 s" in line
    assert not told.exists()


def test_a_tracker_whose_process_is_stopped_is_left_out(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MOST_UNSENT_BYTES", 1 << 18)
    said: list[str] = []
    sender = RowSender("wandb", run_in(tmp_path), said.append)
    assert sender._process is not None
    os.kill(sender._process.pid, signal.SIGSTOP)
    for step in range(20_000):
        sender.send({"step": step, "loss": 1.0})
    sender.close()
    (line,) = said
    assert "takes no more values" in line


def test_the_process_of_a_tracker_ends_when_its_rank_is_gone(told: Path, tmp_path: Path) -> None:
    sender = RowSender("mlflow", run_in(tmp_path), print)
    sender.send({"step": 1, "loss": 1.0})
    assert sender._process is not None and sender._process.stdin is not None
    sender._process.stdin.close()  # as the system does when the rank is killed
    assert sender._process.wait(60) == 0
    assert [row["call"] for row in calls(told, "finish")] == ["finish"]


@pytest.mark.parametrize("tracker", BOTH)
def test_a_loop_of_ones_own_shows_steps_and_combined_evaluations(
    told: Path, tmp_path: Path, tracker: str
) -> None:
    torch.manual_seed(0)
    # What JSON cannot hold is shown as text.
    config: dict[str, Any] = {"rate": 0.1, "data": Path("words.txt")}
    batch = (torch.randn(8, 4), torch.randn(8, 2))
    plan = Plan((Stage(range(3), (0,), (4,)),), 2, 4, "1f1b")
    with Pipeline(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)),
        plan,
        batch,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        metrics={"error": lambda output, target: (output - target).abs().mean()},
        callbacks=[track(tracker, tmp_path / "mine", project="words", config=config)],
    ) as pipe:
        losses = [pipe.step(batch).loss for _ in range(2)]
        parts = [pipe.evaluate(tuple(t[rows] for t in batch)) for rows in (slice(4), slice(4, 8))]
        losses.append(pipe.step(batch).loss)
    (start,) = calls(told, "init")
    assert (start["project"], start["name"]) == ("words", "mine")
    (first,) = {"wandb": [start], "mlflow": calls(told, "params")}[tracker]
    assert first["config"] == {"rate": 0.1, "data": "words.txt"}
    rows = calls(told, "log")
    assert [row["step"] for row in rows] == [1, 2, 2, 3]
    steps, (evaluated,) = [rows[0], rows[1], rows[3]], rows[2:3]
    assert [row["values"]["loss"] for row in steps] == losses
    assert {"error", "gradient_norm", "learning_rate", "bubble"} <= set(steps[0]["values"])
    assert set(evaluated["values"]) == {"evaluation_loss", "evaluation_error"}
    mean = sum(part.loss for part in parts) / 2
    assert evaluated["values"]["evaluation_loss"] == pytest.approx(mean)


@pytest.mark.parametrize("tracker", BOTH)
def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.tracking.registry.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=f"package {tracker} is not installed; install it or leave"):
        track(tracker, tmp_path, project="words")


def test_a_folder_of_the_package_s_name_does_not_make_it_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shown_nowhere").mkdir()
    with pytest.raises(BadInput, match="package shown_nowhere is not installed"):
        check_installed(["shown_nowhere"], "the script")
    (tmp_path / "shown_nowhere" / "__init__.py").touch()
    check_installed(["shown_nowhere"], "the script")


def test_a_tracker_that_is_not_known_is_refused_where_the_job_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('base = "digits"\ntrackers = ["wandb", "tensorboard"]\n')
    with pytest.raises(BadInput, match=r"tracker 'tensorboard', .* use one of wandb, mlflow, or"):
        find_job(tmp_path / "job.toml")
