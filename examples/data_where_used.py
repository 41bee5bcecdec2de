"""Each rank reads only the tensors and rows that its stages use.

torchrun --nproc-per-node 4 examples/data_where_used.py points.npy classes.npy

The files have 16 numbers (float32) and a class of two (int64) for each sample.
"""

import sys
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import penstock
from penstock.plan.plan import Plan, Stage

points, classes = (np.load(path, mmap_mode="r") for path in sys.argv[1:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
# Only the sizes of the example matter, so no rank reads the files for it.
example = (torch.zeros(32, 16), torch.zeros(32, dtype=torch.int64))
graph = penstock.capture_model(model, example, loss=nn.functional.cross_entropy)
stages = (
    Stage(range(1), (0, 1), (2, 6)),
    Stage(range(1, 2), (2,), (8,)),
    Stage(range(2, 4), (3,), (8,)),
)
plan = Plan(stages, micro_batches=4, micro_batch_size=8, schedule="1f1b")

with penstock.Pipeline(
    graph, example, plan=plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
) as pipe:
    print(pipe.needs, flush=True)
    read = partial(pipe.needs.read, {0: points, 1: classes})
    generator = torch.Generator().manual_seed(1)
    numbers = range(len(points))
    loader = penstock.ResumableLoader(
        DataLoader(numbers, 32, shuffle=True, generator=generator, collate_fn=read)
    )
    for part in loader:
        metrics = pipe.step(part)
    if pipe.rank == 0:
        print(f"step {metrics.step}: loss {metrics.loss:.4f}")
