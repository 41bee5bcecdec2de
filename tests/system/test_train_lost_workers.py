"""`penstock train --may-lose` goes on with the workers that are left, until the others are back."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import losses, train

from penstock.errors import BadInput, WorkerLost
from penstock.plan.json_file import read_plan
from penstock.plan.plan import Plan, Stage
from penstock.train.train import TrainResult
from penstock.train.training_loop import pauses_at

pytestmark = pytest.mark.timeout(280)

THREE_STAGES = tuple(
    Stage(range(*run), (rank,), (4,)) for rank, run in enumerate(((0, 1), (1, 3), (3, 4)))
)
GIVEN: dict[str, Any] = {
    "plan": Plan(THREE_STAGES, 4, 4, "1f1b"),
    "workers": 3,
    "shown": True,
    "verify": '"off"',
}
LOSE = GIVEN | {"callbacks": '["training_jobs:lose_a_worker"]', "checkpoint_every": 2, "steps": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The run without a loss."""
    return train(tmp_path_factory.mktemp("whole"), steps=8, **GIVEN)


def test_the_others_go_on_until_the_lost_one_is_back(
    tmp_path: Path, whole: TrainResult, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, costs=whole.run_directory, request={"may_lose": 1}, **LOSE)
    said = capfd.readouterr().err.splitlines()
    assert result.lost_workers == 1
    assert losses(result.run_directory) == pytest.approx(losses(whole.run_directory), rel=1e-5)
    (line,) = (line for line in said if "continues with" in line)
    assert "worker 1 (process" in line and "killed by SIGKILL" in line
    assert line.endswith("; the run continues with 2 worker(s)")
    assert "step 6: the places of 1 lost worker(s) are taken again" in said
    starts = [line for line in said if line.startswith("starting")]
    assert starts == [f"starting {workers} workers" for workers in (3, 2, 3)]
    assert read_plan(result.plan).stages == THREE_STAGES
    assert not any("--resume" in line for line in said)
    assert result.report.is_file()


def test_without_a_checkpoint_the_others_finish_the_run(
    tmp_path: Path, whole: TrainResult, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**LOSE, "checkpoint_every": 8}
    result = train(tmp_path, costs=whole.run_directory, request={"may_lose": 1}, **settings)
    said = capfd.readouterr().err.splitlines()
    assert losses(result.run_directory) == pytest.approx(losses(whole.run_directory), rel=1e-5)
    assert max(read_plan(result.plan).devices) < 2
    assert not any("taken again" in line for line in said)


@pytest.mark.parametrize(
    ("pause_after", "stops"),
    [
        (0, []),
        (1, [8, 12, 16]),
        (2, [12, 16]),
        (3, [16]),
    ],
)
def test_workers_pause_at_scheduled_checkpoints(pause_after: int, stops: list[int]) -> None:
    """Steps 5 to 16 after the checkpoint of step 4; ranks are slow from step 13 on."""
    steps = range(5, 17)
    found = [step for step in steps if pauses_at(step, 4, 4, pause_after)]
    assert found == stops
    assert not any(pauses_at(step, 4, 0, pause_after) for step in steps)


def test_one_loss_more_ends_the_run(
    tmp_path: Path, whole: TrainResult, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerLost, match=r"worker 1 .* was killed by SIGKILL"):
        train(tmp_path, costs=whole.run_directory, **LOSE)
    assert "--resume --out" in capfd.readouterr().err.splitlines()[-1]


def test_more_losses_than_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--may-lose is 3, but of 3 workers at most 2 can be lost"):
        train(tmp_path, request={"may_lose": 3}, **GIVEN)
