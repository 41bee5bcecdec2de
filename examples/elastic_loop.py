"""A loop that continues when torchrun starts its ranks again, as many as there are then.

python examples/elastic_loop.py RUN              (once: measures the model)
torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic_loop.py RUN 3
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock

run, checkpoints = Path(sys.argv[1]), Path(sys.argv[1], "checkpoints")
torch.manual_seed(0)
points = torch.randn(640, 32)
data = TensorDataset(points, (points[:, :16].sum(1) > points[:, 16:].sum(1)).long())
generator = torch.Generator().manual_seed(1)
loader = penstock.ResumableLoader(DataLoader(data, 32, shuffle=True, generator=generator))
layers = [nn.Sequential(nn.Linear(width, 64), nn.Tanh()) for width in (32, 64, 64, 64, 64)]
model = nn.Sequential(*layers, nn.Linear(64, 2))
example = data[:32]
graph = penstock.capture_model(model, example, loss=nn.functional.cross_entropy)


def plan(ranks):
    """Called on rank 0 only, if there is no plan for this number of ranks yet."""
    profile = penstock.read_profile(run / "profile.json")
    cluster = penstock.read_cluster(run / "cluster.toml")
    return penstock.plan_pipeline(
        profile, cluster.first(ranks), 32, micro_batch_size=8, time_limit_s=2.0
    )


def show(pipe, event):
    """Prints each step, also the one after which SIGTERM ends the script."""
    if pipe.rank == 0 and isinstance(event, penstock.StepMetrics):
        print(f"step {event.step}: loss {event.loss}", flush=True)


if len(sys.argv) == 2:
    host = penstock.Host("this", (penstock.Device("core", 1e9),) * 4, 5e9, link_latency_s=5e-5)
    penstock.write_profile(penstock.measure_profile(graph, example), run / "profile.json")
    penstock.write_cluster(penstock.Cluster("this", (host,)), run / "cluster.toml")
    sys.exit()

with penstock.Pipeline(
    graph,
    example,
    plan=penstock.plan_for_ranks(plan, run),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    safety=penstock.Safety(idle_ranks=True),
) as pipe:
    pipe.notify(show, penstock.save_at_sigterm(checkpoints, loader=loader))
    if any(checkpoints.glob("step-*")):
        pipe.load(checkpoints, loader=loader)
    if pipe.rank == 0:
        print(f"{os.environ['WORLD_SIZE']} ranks go on after step {pipe.steps}", flush=True)
    for _ in range(loader.epoch, int(sys.argv[2])):
        for batch in loader:
            pipe.step(batch)
            if pipe.steps % 5 == 0:
                pipe.save(checkpoints, loader=loader)
