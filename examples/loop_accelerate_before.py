"""A loop with Accelerate; `loop_accelerate.py` is the same with Penstock.

accelerate launch examples/loop_accelerate_before.py state
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
points = torch.randn(384, 16)
data = TensorDataset(points, (points[:, :8].sum(1) > points[:, 8:].sum(1)).long())
train, held_out = TensorDataset(*data[:320]), TensorDataset(*data[320:])
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
generator = torch.Generator().manual_seed(1)
loader = DataLoader(train, 16, shuffle=True, generator=generator)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
held_out = accelerator.prepare(DataLoader(held_out, 32))

for _ in range(2):
    losses = []
    for inputs, target in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean())
        if accelerator.sync_gradients and accelerator.is_main_process:
            print(f"loss {torch.stack(losses[-2:]).mean():.6f}")
    model.eval()
    right = [
        accelerator.gather_for_metrics((model(inputs).argmax(1) == target).float())
        for inputs, target in held_out
    ]
    model.train()
    accelerator.print(f"accuracy {torch.cat(right).mean():.4f}")
    accelerator.save_state(sys.argv[1])
