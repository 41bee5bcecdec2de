"""A training loop of your own under torchrun: the same lines on every rank.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
from torch import nn

import penstock
from penstock.plan.plan import Plan, Stage

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
loader = [(torch.randn(32, 16), torch.randint(0, 4, (32,)))] * 30
graph = penstock.capture_model(model, loader[0], loss=nn.CrossEntropyLoss())
half, end = len(graph.layer_names) // 2, len(graph.layer_names)
stages = (Stage(range(half), (0,), (8,)), Stage(range(half, end), (1,), (8,)))
plan = Plan(stages, micro_batches=4, micro_batch_size=8, schedule="1f1b")

with penstock.Pipeline(
    graph, loader[0], plan=plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
) as pipe:
    for batch in loader:
        metrics = pipe.step(batch)
    if pipe.rank == 0:
        print(f"step {metrics.step}: loss {metrics.loss:.4f}")
