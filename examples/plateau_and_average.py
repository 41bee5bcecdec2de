"""A rate that falls when the loss on held-out data no longer does, and averaged weights.

torchrun --nproc-per-node 2 examples/plateau_and_average.py
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import penstock
from penstock import Plan, Stage, Update

torch.manual_seed(0)
points = torch.randn(320, 16)
labels = (points[:, :8].sum(1) > points[:, 8:].sum(1)).long()
batches = list(zip(points.split(32), labels.split(32), strict=True))
held_out = [batches.pop(), batches.pop()]
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
plan = Plan((Stage(range(2), (0,), (8,)), Stage(range(2, 3), (1,), (8,))), 4, 8, "1f1b")


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)


pipe = penstock.Pipeline(
    penstock.capture_model(model, batches[0], loss=nn.functional.cross_entropy),
    batches[0],
    plan=plan,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    learning_rate_schedule=plateau,
    update=Update(schedule_follows="evaluation"),
)
average = penstock.ExponentialAverage(decay=0.98)
pipe.notify(average)
for _ in range(6):
    for batch in batches:
        metrics = pipe.step(batch)
    evaluation = pipe.evaluate(*held_out)
    pipe.step_schedule(evaluation.loss)
with average.weights(pipe):
    averaged = pipe.evaluate(*held_out)
if pipe.rank == 0:
    print(
        f"rate {metrics.learning_rate:g}, loss {evaluation.loss:.3f}, {averaged.loss:.3f} averaged"
    )
pipe.close()
