"""Two epochs of a module under Lightning: by one device, or by a pipeline where there are ranks.

Accumulation over batches, a value of each epoch, a plateau schedule and an early stop.
"""

import os
import sys
from pathlib import Path

import lightning
from lightning.pytorch.callbacks import EarlyStopping
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from penstock.integrations.loops.lightning import PipelineStrategy, captured_step
from penstock.plan.plan import Plan, Stage

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from loop_lightning_before import Classifier, data


class OnPlateau(Classifier):
    """Its rate falls at once, since no evaluation is better than the first by 10."""

    def configure_optimizers(self):
        """A schedule that follows a logged value."""
        optimizer = SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class Told(lightning.Callback):
    """Prints an epoch's values."""

    def on_train_epoch_end(self, trainer, module):
        """After the evaluation."""
        if trainer.is_global_zero:
            values = trainer.callback_metrics
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            print(
                f"epoch {trainer.global_step} {values['accuracy']:.6f} {values['val_loss']:.6f} "
                f"{values['val_accuracy']:.6f} {rate:.6f}"
            )


if __name__ == "__main__":
    lightning.seed_everything(0)
    train, held_out = data()
    module, example = OnPlateau(), next(iter(train))
    options = {"devices": 1}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        end = len(captured_step(module, example).layer_names)
        stages = (Stage(range(2), (0,), (8,)), Stage(range(2, end), (1,), (8,)))
        plan = Plan(stages, micro_batches=4, micro_batch_size=8, schedule="1f1b")
        options = {"devices": 2, "strategy": PipelineStrategy(example, plan=plan)}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=6,
        accumulate_grad_batches=2,
        gradient_clip_val=0.2,
        callbacks=[Told(), EarlyStopping("val_loss", min_delta=10.0, patience=3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, train, held_out)
    if trainer.is_global_zero:
        print(f"weights {sum(p.abs().sum().item() for p in module.parameters()):.4f}")
