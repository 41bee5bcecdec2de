"""Two ranks that each keep half of a model's parameters, gradients and optimizer state.

torchrun --nproc-per-node 2 examples/divided_parameters.py
"""

import torch
from torch import nn

import penstock
from penstock.plan.plan import Plan, Stage

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
whole = sum(parameter.numel() for parameter in model.parameters())
inputs = torch.randn(30, 16, 16)
loader = [(x, x[:, :4].argmax(1)) for x in inputs]
graph = penstock.capture_model(model, loader[0], loss=nn.CrossEntropyLoss())


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


stage = Stage(range(len(graph.layer_names)), (0, 1), (4, 4), sharding="parameters")
plan = Plan((stage,), micro_batches=2, micro_batch_size=8, schedule="1f1b")
with penstock.Pipeline(graph, loader[0], plan=plan, optimizer=adam) as pipe:
    for batch in loader:
        metrics = pipe.step(batch)
    held = sum(parameter.numel() for parameter in pipe.parameters())
    if pipe.rank == 0:
        print(f"step {metrics.step}: loss {metrics.loss:.4f}; {held} of {whole} parameters here")
