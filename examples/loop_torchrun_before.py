"""A plain loop with DistributedDataParallel; `loop_torchrun.py` is the same with Penstock.

torchrun --nproc-per-node 2 examples/loop_torchrun_before.py checkpoint.pt
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
points = torch.randn(320, 16)
data = TensorDataset(points, (points[:, :8].sum(1) > points[:, 8:].sum(1)).long())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // ranks, sampler=sampler)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"loss {mean:.6f}")
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"schedule": schedule.state_dict(), "epoch": epoch + 1}, sys.argv[1])
dist.destroy_process_group()
