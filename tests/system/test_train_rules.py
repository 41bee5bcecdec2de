"""`penstock train` with rules of update that look beyond a step, as on one device."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import TWO_STAGES, rows_of
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_jobs import job_file

from penstock.errors import BadInput
from penstock.plan.json_file import write_plan
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.optimizers import optimizer_factory
from penstock.train.profile_job import built_model
from penstock.train.train import TrainRequest, train_job

pytestmark = pytest.mark.timeout(280)


def trained(job: Path, folder: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    """The records of a run, which goes on if it was there."""
    plan, run = folder / "plan.json", folder / "run"
    write_plan(TWO_STAGES, plan)
    given = None if resume else plan
    asked = TrainRequest(workers=2, plan=given, out=run, resume=resume, shown=False)
    train_job(find_job(job), asked)
    return rows_of(run)


def alone(
    job: Job, arguments: dict[str, Any], decay: float
) -> tuple[Any, list[float], list[float]]:
    """The averaged model, the rates of steps, its losses on held-out data, of torch's own loop."""
    model = built_model(job)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = optimizer_factory(job.optimizer)(model.named_parameters())
    schedule = ReduceLROnPlateau(optimizer, **arguments)
    rates, held_out = list[float](), list[float]()
    for step, (x, y) in enumerate(islice(job.batches("train"), job.steps), 1):
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        average.update_parameters(model)
        if step % job.evaluate_every == 0:
            with torch.no_grad():
                batches = islice(job.batches("held-out"), job.evaluation_batches)
                losses = [functional.mse_loss(average(x), y).item() for x, y in batches]
            held_out.append(sum(losses) / len(losses))
            schedule.step(held_out[-1])
    return average.module, rates, held_out


def test_a_plateau_and_an_average_go_on_after_a_resume(tmp_path: Path) -> None:
    path = job_file(
        tmp_path, steps=7, evaluate_every=1, seed=3, average_decay=0.6, save_weights='"saved"'
    )
    # No loss is better than the one before by so much.
    table = {"factor": 0.5, "patience": 1, "threshold": 0.9}
    written = ", ".join(f"{key} = {value}" for key, value in table.items())
    text = path.read_text().replace('schedule = "constant"', 'schedule = "plateau"')
    whole = f"{text}\nwarm_up_steps = 0\nplateau = {{ {written} }}\n"
    path.write_text(whole.replace("steps = 7", "steps = 5", 1))
    trained(path, tmp_path)
    (tmp_path / "saved").rename(tmp_path / "before")
    path.write_text(whole)
    rows = trained(path, tmp_path, resume=True)
    model, rates, held_out = alone(find_job(path), table, 0.6)
    assert len(set(rates)) > 2
    assert [row["learning_rate"] for row in rows if "learning_rate" in row] == rates
    found = [row["evaluation_loss"] for row in rows if "evaluation_loss" in row]
    torch.testing.assert_close(found, held_out, rtol=1e-5, atol=0)
    saved = [load_file(file) for file in (tmp_path / "saved").glob("*.safetensors")]
    found = {name: value for file in saved for name, value in file.items()}
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-4, atol=1e-6)


def test_a_run_beyond_its_end_is_told_what_becomes_of_its_rate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path, checkpoint_every=0, evaluate_every=0)
    path.write_text(path.read_text().replace('"constant"', '"cosine"'))
    write_plan(TWO_STAGES, tmp_path / "plan.json")
    run = TrainRequest(workers=2, plan=tmp_path / "plan.json", out=tmp_path / "run")
    train_job(find_job(path, ["steps=4"]), run)
    again = replace(run, plan=None, resume=True)
    with pytest.raises(BadInput, match=r"4 steps and is to take 6, .* until step 4; add --lr-sch"):
        train_job(find_job(path), again)
    train_job(find_job(path), replace(again, lr_schedule="keep"))
    assert "--lr-schedule keep: the learning rate falls until step 4" in capfd.readouterr().err
    train_job(find_job(path, ["steps=8"]), replace(again, lr_schedule="stretch"))
    rates = [row["learning_rate"] for row in rows_of(tmp_path / "run")]
    assert rates[1] == pytest.approx(0.01)  # warmed up in half of four steps
    assert rates[4:6] == pytest.approx([0.001, 0.001])
    assert rates[6] > rates[7] > 0.001
