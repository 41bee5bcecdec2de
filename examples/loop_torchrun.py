"""The loop of `loop_torchrun_before.py`, in which Penstock takes the steps.

torchrun --nproc-per-node 2 examples/loop_torchrun.py checkpoints
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import penstock
from penstock.plan.plan import Plan, Stage

checkpoints = Path(sys.argv[1])
torch.manual_seed(0)
points = torch.randn(320, 16)
data = TensorDataset(points, (points[:, :8].sum(1) > points[:, 8:].sum(1)).long())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
loader = DataLoader(data, 32, sampler=sampler)
# Written by hand to keep the example short: `penstock plan` writes a plan, `read_plan` reads it.
stages = (Stage(range(2), (0,), (8,)), Stage(range(2, 4), (1,), (8,)))
plan = Plan(stages, micro_batches=4, micro_batch_size=8, schedule="1f1b")

with penstock.Pipeline(
    model,
    data[:32],
    plan=plan,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    learning_rate_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(
        optimizer, 0.1, total_iters=10
    ),
    clip_norm=1.0,
) as pipe:
    if any(checkpoints.glob("step-*")):
        pipe.load(checkpoints)
    for epoch in range(pipe.steps // len(loader), 2):
        sampler.set_epoch(epoch)
        for batch in loader:
            metrics = pipe.step(batch)
            if pipe.rank == 0:
                print(f"loss {metrics.loss:.6f}")
        pipe.save(checkpoints)
