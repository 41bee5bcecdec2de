"""A loop with metrics, callbacks and checkpoints that continues exactly where it was stopped.

torchrun --nproc-per-node 2 examples/resumable_loop.py 3 checkpoints
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.plan.plan import Plan, Stage

epochs, checkpoints = int(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
points = torch.randn(320, 16)
data = TensorDataset(points, (points[:, :8].sum(1) > points[:, 8:].sum(1)).long())
generator = torch.Generator().manual_seed(1)
loader = penstock.ResumableLoader(DataLoader(data, 32, shuffle=True, generator=generator))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
example = data[:32]
graph = penstock.capture_model(model, example, loss=nn.functional.cross_entropy)
stages = (Stage(range(1), (0,), (8,)), Stage(range(1, len(graph.layer_names)), (1,), (8,)))
plan = Plan(stages, micro_batches=4, micro_batch_size=8, schedule="1f1b")


def accuracy(output, target):
    """The mean over the samples given; those of other slices are added by their number."""
    return (output.argmax(1) == target).float().mean()


def show(pipe, event):
    """Called on every rank, with the same events."""
    if pipe.rank == 0 and isinstance(event, penstock.Evaluation):
        print(f"step {pipe.steps}: loss {event.loss:.4f}, accuracy {event.metrics['accuracy']:.2f}")


with penstock.Pipeline(
    graph,
    example,
    plan=plan,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    metrics={"accuracy": accuracy},
    update=penstock.Update(seed=2),
) as pipe:
    pipe.notify(show)
    if any(checkpoints.glob("step-*")):
        pipe.load(checkpoints, loader=loader)
    for _ in range(loader.epoch, epochs):
        for batch in loader:
            pipe.step(batch)
            if pipe.steps % 4 == 0:
                pipe.save(checkpoints, loader=loader)
        pipe.evaluate(data[:64])
    scores = pipe.predict(points[:5])
    if pipe.rank == 0:
        print("predicted", scores.argmax(1).tolist())
