"""A LightningModule and its Trainer; `loop_lightning.py` trains the same module by a plan.

python examples/loop_lightning_before.py checkpoints
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """A module as people have it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        """The logits."""
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        """The loss, and what is logged."""
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) + 1e-3 * logits.square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the figures that callbacks follow."""
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        """The optimizer, and a schedule of epochs."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Printed(lightning.Callback):
    """Prints what was logged, on rank 0."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        """Each batch's loss."""
        if trainer.is_global_zero:
            print(f"loss {trainer.callback_metrics['loss']:.6f}")

    def on_validation_epoch_end(self, trainer, module):
        """Each evaluation's values."""
        if trainer.is_global_zero:
            print(f"val_loss {trainer.callback_metrics['val_loss']:.6f}")


def data():
    """Batches of 32 for training, and of 64 held out."""
    points = torch.randn(384, 16, generator=torch.Generator().manual_seed(1))
    whole = TensorDataset(points, (points[:, :8].sum(1) > points[:, 8:].sum(1)).long())
    return DataLoader(TensorDataset(*whole[:320]), 32), DataLoader(TensorDataset(*whole[320:]), 64)


def trainer(directory, **options):
    """As in any script; ``options`` are what differs."""
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0} | options
    saved = lightning.pytorch.callbacks.ModelCheckpoint(
        directory, "{epoch}", monitor="val_loss", save_top_k=-1
    )
    return lightning.Trainer(
        accelerator="cpu",
        callbacks=[Printed(), saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


if __name__ == "__main__":
    lightning.seed_everything(0)
    train, held_out = data()
    module = Classifier()
    trainer(sys.argv[1], devices=1).fit(module, train, held_out)
