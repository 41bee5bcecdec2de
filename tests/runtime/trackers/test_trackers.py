"""Trackers get every row, and none that fails ends a training.

Neither library is installed where this runs: `stand_ins` has modules with their signatures.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.callbacks import Callback, Closing
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.trackers import TRACKERS, check_trackers, track
from penstock.train.job_file import find_job

STAND_INS = Path(__file__).parent / "stand_ins"
BOTH = tuple(TRACKERS)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which the stand-ins write what they were told."""
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "told.jsonl"
    for name in BOTH:
        sys.modules.pop(name, None)


def calls(told: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    return [row for row in rows if row["call"] == name]


def metrics_at(step: int) -> StepMetrics:
    return StepMetrics(step, 1 / step, 1.0, 0.1, 8, 0.5, 0.0)


def take_steps(show: Callback, steps: range) -> None:
    pipe = SimpleNamespace(rank=0)
    for step in steps:
        show(pipe, metrics_at(step))
    show(pipe, Closing(steps[-1]))


def tracker_in(folder: Path, tracker: str, said: list[str]) -> Callback:
    about: Any = {"project": "words", "name": "first", "config": {"rate": 0.5}}
    return track(tracker, folder / "trackers", **about, say=said.append)


@pytest.mark.parametrize("tracker", BOTH)
def test_rows_arrive_and_a_later_start_goes_on_with_the_run(
    told: Path, tmp_path: Path, tracker: str
) -> None:
    said: list[str] = []
    for steps in (range(1, 4), range(4, 6)):
        take_steps(tracker_in(tmp_path, tracker, said), steps)
    assert said == []
    first, again = calls(told, "init")
    assert (first["project"], first["name"]) == ("words", "first")
    assert first["id"] == again["id"] == (tmp_path / f"trackers/{tracker}.id").read_text().strip()
    logged = [(row["step"], row["values"]["loss"]) for row in calls(told, "log")]
    assert logged == [(step, 1 / step) for step in range(1, 6)]
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
    take_steps(tracker_in(tmp_path, "wandb", said), range(1, 4))
    assert said == [
        f"tracker 'wandb' has failed (ConnectionError: the server is away ({place})); the run "
        f"continues without it"
    ]


def test_other_ranks_show_nothing(told: Path, tmp_path: Path) -> None:
    tracker_in(tmp_path, "wandb", [])(SimpleNamespace(rank=1), metrics_at(1))
    assert not told.exists()


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
        batch,
        plan=plan,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        metrics={"error": lambda output, target: (output - target).abs().mean()},
    ) as pipe:
        pipe.notify(track(tracker, tmp_path / "mine", project="words", config=config))
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
    monkeypatch.setattr("penstock.runtime.trackers.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=f"package {tracker} is not installed; install it or leave"):
        track(tracker, tmp_path, project="words")


def test_a_folder_of_the_package_s_name_does_not_make_it_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRACKERS, "shown_nowhere", TRACKERS["wandb"])
    (tmp_path / "shown_nowhere").mkdir()
    with pytest.raises(BadInput, match="package shown_nowhere is not installed"):
        check_trackers(["shown_nowhere"], "the script")
    (tmp_path / "shown_nowhere" / "__init__.py").touch()
    check_trackers(["shown_nowhere"], "the script")


def test_a_tracker_that_is_not_known_is_refused_where_the_job_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('base = "digits"\ntrackers = ["wandb", "tensorboard"]\n')
    with pytest.raises(BadInput, match=r"tracker 'tensorboard', .* use one of wandb, mlflow, or"):
        find_job(tmp_path / "job.toml")
