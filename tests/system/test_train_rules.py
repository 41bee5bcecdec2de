"""`penstock train` with rules of update that look beyond a step, as on one device."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows_of, train, weights_in
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock.errors import BadInput
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.optimizers import optimizer_factory
from penstock.train.profile_job import built_model

pytestmark = pytest.mark.timeout(280)


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
    settings = {"evaluate_every": 1, "seed": 3, "average_decay": 0.6, "save_weights": '"saved"'}
    # No loss is better than the one before by so much.
    table = {"factor": 0.5, "patience": 1, "threshold": 0.9}
    written = ", ".join(f"{key} = {value}" for key, value in table.items())
    changes = (f"plateau={{ {written} }}", "schedule=plateau", "warm_up_steps=0")
    plateau = [f"optimizer.{change}" for change in changes]
    train(tmp_path, steps=5, changes=plateau, **settings)
    (tmp_path / "saved").rename(tmp_path / "before")
    train(tmp_path, None, steps=7, changes=plateau, resume=True, **settings)
    rows = rows_of(tmp_path / "run")
    model, rates, held_out = alone(find_job(tmp_path / "small.toml", plateau), table, 0.6)
    assert len(set(rates)) > 2
    assert [row["learning_rate"] for row in rows if "learning_rate" in row] == rates
    found = [row["evaluation_loss"] for row in rows if "evaluation_loss" in row]
    torch.testing.assert_close(found, held_out, rtol=1e-5, atol=0)
    saved = weights_in(tmp_path / "saved")
    torch.testing.assert_close(saved, dict(model.state_dict()), rtol=1e-4, atol=1e-6)


def test_a_run_beyond_its_end_is_told_what_becomes_of_its_rate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"checkpoint_every": 0, "evaluate_every": 0, "shown": True}
    given: dict[str, Any] = {**settings, "changes": ["optimizer.schedule=cosine"]}
    again: dict[str, Any] = {**given, "plan": None, "resume": True}
    train(tmp_path, steps=4, **given)
    with pytest.raises(BadInput, match=r"4 steps and is to take 6, .* until step 4; add --lr-sch"):
        train(tmp_path, **again)
    train(tmp_path, request={"lr_schedule": "keep"}, **again)
    assert "--lr-schedule keep: the learning rate falls until step 4" in capfd.readouterr().err
    train(tmp_path, steps=8, request={"lr_schedule": "stretch"}, **again)
    rates = [row["learning_rate"] for row in rows_of(tmp_path / "run")]
    assert rates[1] == pytest.approx(0.01)  # warmed up in half of four steps
    assert rates[4:6] == pytest.approx([0.001, 0.001])
    assert rates[6] > rates[7] > 0.001
