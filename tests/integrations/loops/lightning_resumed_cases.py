"""A run under Lightning whose plan was found, and one that goes on from its checkpoint.

Each prints the stages of its plan when it begins, and its weights at the end.
"""

import sys
from pathlib import Path

import lightning

from penstock.integrations.loops.lightning import PipelineStrategy

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from loop_lightning_before import Classifier, data, trainer
from plan_here_cases import ONE, TWO, find_other_plan


class Stages(lightning.Callback):
    """Prints the plan, which the first step can no longer change."""

    def on_train_start(self, trainer, module):
        """After the checkpoint was read."""
        self.counted = len(trainer.strategy.pipe.plan.stages)


def fit(name, folder, constraints, *, epochs=2, checkpoint=None):
    """Train from the first weights, or go on from a checkpoint."""
    lightning.seed_everything(0)
    train, held_out = data()
    module, stages = Classifier(), Stages()
    strategy = PipelineStrategy(next(iter(train)), constraints=constraints)
    own = trainer(folder, devices=2, strategy=strategy, max_epochs=epochs)
    own.callbacks.append(stages)
    own.fit(module, train, held_out, ckpt_path=checkpoint)
    if own.is_global_zero:
        weights = sum(p.abs().sum().item() for p in module.parameters())
        print(f"{name}: {stages.counted} stages, weights {weights:.5f}")
    return own.is_global_zero


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fit("whole", folder / "whole", TWO)
    if fit("other", folder / "other", ONE, epochs=1):
        find_other_plan(TWO, ONE)
    fit("resumed", folder / "resumed", TWO, checkpoint=folder / "whole" / "epoch=0.ckpt")
