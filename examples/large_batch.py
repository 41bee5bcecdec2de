"""Steps on two batches each, in float16, with replicas that share the optimizer's state.

torchrun --nproc-per-node 2 examples/large_batch.py
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
plan = Plan((Stage(range(layers), (0, 1), (4, 4)),), 4, 8, "gpipe")

with penstock.Pipeline(
    graph,
    loader[0],
    plan=plan,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    autocast=torch.float16,
    constraints=penstock.Constraints(sharding="optimizer"),
) as pipe:
    for first, second in zip(loader[::2], loader[1::2], strict=True):
        metrics = pipe.step(first, second)
    if pipe.rank == 0:
        print(f"step {metrics.step}: loss {metrics.loss:.4f} on {metrics.samples} samples")
        print(f"loss scale {metrics.loss_scale:.0f}")
