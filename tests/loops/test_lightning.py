"""Lightning's own features on a pipeline: as on one device, or refused in one line."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn

from penstock.errors import BadInput
from penstock.loops.lightning import check_supported

CASES = Path(__file__).with_name("lightning_cases.py")


def lines_of(*command: str) -> list[list[str]]:
    result = subprocess.run(
        [sys.executable, *command, str(CASES)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_accumulation_plateaus_early_stops_and_values_of_epochs_are_those_of_one_device() -> None:
    one = lines_of()
    two = lines_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert [line[:2] for line in two] == [line[:2] for line in one[:-1]] + [two[-1][:2]]
    assert len(one) == 5  # stopped after four epochs of six; then the weights
    for here, there in zip(two, one, strict=True):
        assert [float(n) for n in here[1:]] == pytest.approx(
            [float(n) for n in there[1:]], abs=2e-5
        )
    assert two[0][-1] == "0.500000" != two[-2][-1]


class Averaging(lightning.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass


class Manual(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(lightning.LightningModule):
    def backward(self, loss: Any) -> None:
        pass


REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (Manual, {}, "automatic_optimization is off"),
    (OwnBackward, {}, "OwnBackward.backward has no place in a pipeline's step"),
    (lightning.LightningModule, {"callbacks": [Averaging()]}, "Averaging.on_before_optimizer_step"),
    (
        lightning.LightningModule,
        {"callbacks": [StochasticWeightAveraging(1e-2)]},
        "StochasticWeightAveraging has no place",
    ),
    (
        lightning.LightningModule,
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "a pipeline clips by 'norm'",
    ),
    (lightning.LightningModule, {"precision": "64-true"}, "precision is '64-true'"),
]


@pytest.mark.parametrize(("module", "options", "words"), REFUSED)
def test_what_a_step_has_no_place_for_is_refused(
    module: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, **options)
    trainer.strategy.connect(module())
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(BadInput, match=words):
        check_supported(trainer)


def test_only_fit_is_of_a_pipeline() -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(lightning.LightningModule())
    trainer.state.fn = TrainerFn.TESTING
    with pytest.raises(BadInput, match="only fits"):
        check_supported(trainer)
