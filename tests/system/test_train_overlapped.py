"""`penstock train` with steps that are checked afterwards: the losses of plain steps."""

import json
from pathlib import Path

import pytest
from training_jobs import job_file

from penstock.errors import BadInput
from penstock.jobs.job_file import find_job
from penstock.jobs.train import TrainRequest, train_job

pytestmark = pytest.mark.timeout(280)


def test_losses_evaluations_and_checkpoints_are_those_of_plain_steps(tmp_path: Path) -> None:
    """Evaluated and saved in between; gradients are clipped now and then."""
    recorded: list[list[dict[str, float]]] = []
    for when in ("before", "after"):
        folder = tmp_path / when
        folder.mkdir()
        settings = {"evaluate_every": 3, "checkpoint_every": 4, "clip_norm": 1.5, "steps": 8}
        job = find_job(job_file(folder, optimizer_sync=f'"{when}"', **settings))
        request = TrainRequest(workers=2, schedule="zb-h2", out=folder / "run", shown=False)
        directory = train_job(job, request).run_directory
        rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        keys = ("step", "loss", "gradient_norm", "learning_rate", "evaluation_loss")
        recorded.append([{key: row.get(key, 0.0) for key in keys} for row in rows])
        saved = {path.name for path in (directory / "checkpoints").iterdir()}
        assert saved == {"step-00000004", "step-00000008"}
    plain, ours = recorded
    assert [row["step"] for row in ours] == [row["step"] for row in plain]
    for mine, theirs in zip(ours, plain, strict=True):
        # Both are planned for themselves, so sums may be rounded differently.
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_steps_of_several_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="accumulate = 2 does not work with optimizer_sync"):
        find_job(job_file(tmp_path, optimizer_sync='"after"', accumulate=2))
