"""A training that ends when the loss on held-out data no longer falls, and keeps the best weights.

torchrun --nproc-per-node 2 examples/early_stop.py CHECKPOINTS
"""

import sys

import torch
from torch import nn

import penstock
from penstock import Plan, Stage

torch.manual_seed(0)
points, noise = torch.randn(320, 16), torch.randn(320)
labels = (points[:, 0] + 2 * noise > 0).long()
batches = list(zip(points.split(32), labels.split(32), strict=True))
held_out = [batches.pop(), batches.pop()]
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))
plan = Plan((Stage(range(2), (0,), (8,)), Stage(range(2, 3), (1,), (8,))), 4, 8, "1f1b")
pipe = penstock.Pipeline(
    penstock.capture_model(model, batches[0], loss=nn.functional.cross_entropy),
    batches[0],
    plan=plan,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
)
pipe.notify(penstock.stop_early(3), penstock.keep_best(sys.argv[1]))
while not pipe.stopping:
    for batch in batches:
        pipe.step(batch)
    pipe.evaluate(*held_out)
last = pipe.steps
best = pipe.load(sys.argv[1])
loss = pipe.evaluate(*held_out).loss
if pipe.rank == 0:
    print(f"ended after step {last}, best after step {best}: loss {loss:.3f}")
pipe.close()
