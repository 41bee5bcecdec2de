"""The loop of `loop_accelerate_before.py`, in which Penstock takes the steps.

torchrun --nproc-per-node 2 examples/loop_accelerate.py checkpoints
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.plan.plan import Plan, Stage

checkpoints = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
set_seed(0)
points = torch.randn(384, 16)
data = TensorDataset(points, (points[:, :8].sum(1) > points[:, 8:].sum(1)).long())
train, held_out = TensorDataset(*data[:320]), TensorDataset(*data[320:])
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
generator = torch.Generator().manual_seed(1)
loader = penstock.ResumableLoader(DataLoader(train, 16, shuffle=True, generator=generator))
# Written by hand to keep the example short: `penstock plan` writes a plan, `read_plan` reads it.
stages = (Stage(range(2), (0,), (4,)), Stage(range(2, 4), (1,), (4,)))
plan = Plan(stages, micro_batches=4, micro_batch_size=4, schedule="1f1b")


def accuracy(output, target):
    """The mean over the samples given; those of other slices are added by their number."""
    return (output.argmax(1) == target).float().mean()


with penstock.Pipeline(
    model,
    data[:16],
    plan=plan,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    learning_rate_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(
        optimizer, 0.1, total_iters=10
    ),
    clip_norm=1.0,
    metrics={"accuracy": accuracy},
) as pipe:
    if any(checkpoints.glob("step-*")):
        pipe.load(checkpoints, loader=loader)
    for _ in range(loader.epoch, 2):
        batches = iter(loader)
        for two in zip(batches, batches, strict=True):
            metrics = pipe.step(*two)
            if accelerator.is_main_process:
                print(f"loss {metrics.loss:.6f}")
        parts = [pipe.evaluate(batch) for batch in DataLoader(held_out, 32)]
        score = penstock.Evaluation.combined(parts).metrics["accuracy"]
        accelerator.print(f"accuracy {score:.4f}")
        pipe.save(checkpoints, loader=loader)
accelerator.end_training()
