"""What a pipeline refuses of Lightning, and a trainer that asks for it.

A module of its own: Lightning takes seconds to import, and only two tests need it.
"""

from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


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


Case = tuple[Callable[[], lightning.LightningModule], dict[str, Any], str]
REFUSED: list[Case] = [
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


def trainer_of(module: lightning.LightningModule, does: str, **options: Any) -> lightning.Trainer:
    """Return a trainer that is about to run `does` ("fit", "test") on `module`."""
    trainer = lightning.Trainer(accelerator="cpu", logger=False, **options)
    trainer.strategy.connect(module)
    trainer.state.fn = TrainerFn(does)
    return trainer
