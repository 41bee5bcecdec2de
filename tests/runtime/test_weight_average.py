"""Averaged weights are torch's, however a plan divides them, and checkpoints go on with them."""

from pathlib import Path

import pytest
import torch
from runtime.average_cases import averaged
from torch import nn
from torch.nn.functional import mse_loss

from penstock import BadInput, ExponentialAverage, Pipeline, Plan, Stage
from penstock.runtime.processes.launch import launch_workers

BATCH = torch.ones(4, 3), torch.zeros(4, 2)
PLAN = Plan((Stage(range(2), (0,), (4,)),), 1, 4, "1f1b")


def pipeline(model: nn.Module, **options: object) -> Pipeline:
    return Pipeline(
        model,
        BATCH,
        plan=PLAN,
        loss=mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        **options,
    )


def test_averages_equal_torchs_under_every_plan_and_go_on_under_another(tmp_path: Path) -> None:
    first, second = launch_workers(averaged, (tmp_path,), workers=2, threads=1)
    assert len(first) == 16 and len(second) == 4
    for name, difference in (first | second).items():
        assert difference < 1e-12, f"{name}: {difference}"


def test_weights_of_16_bits_have_an_average_of_32() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    batch = BATCH[0].bfloat16(), BATCH[1].bfloat16()
    average, wanted = ExponentialAverage(0.9), None
    with Pipeline(
        model, batch, plan=PLAN, loss=mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)
    ) as pipe:
        pipe.notify(average)
        for _ in range(4):
            pipe.step(batch)
            weight = dict(pipe.named_parameters())["weight"].detach().float()
            wanted = weight if wanted is None else wanted.lerp(weight, 0.1)
        assert wanted is not None
        torch.testing.assert_close(pipe.state_dict()["average.weight"], wanted)
        with average.weights(pipe):
            found = dict(pipe.named_parameters())["weight"].detach().clone()
        assert torch.equal(found, wanted.bfloat16())


def test_a_pipeline_without_the_average_leaves_it_out(tmp_path: Path) -> None:
    with pipeline(nn.Linear(3, 2)) as pipe:
        pipe.notify(ExponentialAverage())
        pipe.step(BATCH)
        pipe.save(tmp_path)
    with pipeline(nn.Linear(3, 2)) as pipe:
        pipe.load(tmp_path)
        assert "average.weight" not in pipe.state_dict()


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(BadInput, match=r"decay is 1; it must be >= 0 and below 1"):
        ExponentialAverage(1)
    with pipeline(nn.Linear(3, 2)) as pipe:
        with (
            pytest.raises(BadInput, match="no averaged weights"),
            ExponentialAverage().weights(pipe),
        ):
            pass
        pipe.notify(ExponentialAverage())
        with pytest.raises(BadInput, match="averaged already"):
            pipe.notify(ExponentialAverage())
