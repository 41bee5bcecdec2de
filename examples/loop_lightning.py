"""A LightningModule's methods in a loop of Penstock's.

torchrun --nproc-per-node 2 examples/loop_lightning.py checkpoints
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.plan.plan import Plan, Stage


class Classifier(nn.Module):
    """Your module; in your project its class is derived from `lightning.LightningModule`."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        """The logits."""
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        """The loss, and what metrics need."""
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) + 1e-3 * logits.square().mean()
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self, parameters):
        """Takes those of one rank, in place of ``self.parameters()``."""
        return torch.optim.AdamW(parameters, lr=1e-2)

    def configure_schedule(self, optimizer):
        """What `configure_optimizers` returned as its ``lr_scheduler``."""
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


class TrainingStep(nn.Module):
    """A model whose result is that of a module's training step."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, y):
        """The step; of its arguments ``batch_idx`` is always 0."""
        return self.module.training_step((x, y), 0)


def accuracy(output, batch):
    """In place of ``self.log("accuracy", ...)`` in the training step."""
    return (output["logits"].argmax(1) == batch[1]).float().mean()


def stop_when_good(pipe, event):
    """In place of an `EarlyStopping`: called on every rank, with the same events."""
    if isinstance(event, penstock.Evaluation):
        if pipe.rank == 0:
            print(f"accuracy {event.metrics['accuracy']:.4f}")
        if event.loss < 0.05:
            pipe.stop()


def batches():
    """What a `LightningDataModule` gives: training data, and held-out data."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(384, 16, generator=generator)
    data = TensorDataset(points, (points[:, :8].sum(1) > points[:, 8:].sum(1)).long())
    train = TensorDataset(*data[:320])
    return DataLoader(train, 32, shuffle=True, generator=generator), data[320:]


def fit(module, epochs, checkpoints):
    """In place of ``Trainer(max_epochs=epochs, gradient_clip_val=1.0).fit(module)``."""
    train, held_out = batches()
    loader = penstock.ResumableLoader(train)
    graph = penstock.capture_model(TrainingStep(module), held_out)
    half, end = len(graph.layer_names) // 2, len(graph.layer_names)
    stages = (Stage(range(half), (0,), (8,)), Stage(range(half, end), (1,), (8,)))
    plan = Plan(stages, micro_batches=4, micro_batch_size=8, schedule="1f1b")
    with penstock.Pipeline(
        graph,
        plan,
        held_out,
        optimizer=module.configure_optimizers,
        learning_rate_schedule=module.configure_schedule,
        clip_norm=1.0,
        metrics={"accuracy": accuracy},
    ) as pipe:
        pipe.notify(stop_when_good)
        if any(checkpoints.glob("step-*")):
            pipe.load(checkpoints, loader=loader)
        while loader.epoch < epochs and not pipe.stopping:
            for batch in loader:
                metrics = pipe.step(batch)
                if pipe.rank == 0:
                    print(f"loss {metrics.loss:.6f}")
                if pipe.stopping:
                    break
            pipe.evaluate(held_out)
            pipe.save(checkpoints, loader=loader)


if __name__ == "__main__":
    torch.manual_seed(0)
    fit(Classifier(), 2, Path(sys.argv[1]))
