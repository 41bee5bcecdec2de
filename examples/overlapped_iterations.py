"""Optimizer steps that are taken at once and checked afterwards, so that iterations overlap.

torchrun --nproc-per-node 2 examples/overlapped_iterations.py
"""

import torch
from torch import nn

import penstock
from penstock.plan.plan import Plan, Stage

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
inputs = torch.randn(60, 32, 16)
loader = [(x, x[:, :4].argmax(1)) for x in inputs]
graph = penstock.capture_model(model, loader[0], loss=nn.CrossEntropyLoss())
layers = len(graph.layer_names)
stages = (Stage(range(2), (0,), (4,)), Stage(range(2, layers), (1,), (4,)))
plan = Plan(stages, micro_batches=8, micro_batch_size=4, schedule="zb-h2")

with penstock.Pipeline(
    graph,
    plan,
    loader[0],
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    clip_norm=1.0,
    update=penstock.Update(optimizer_sync="after"),
) as pipe:
    for metrics in pipe.stream(loader):
        last = metrics
    if pipe.rank == 0:
        print(f"step {last.step}: loss {last.loss:.4f}, gradient norm {last.gradient_norm:.4f}")
