"""A teacher that the loop moves after the student, although the two are on different ranks.

torchrun --nproc-per-node 2 examples/moving_teacher.py
"""

import copy

import torch
from torch import nn
from torch.nn import functional

from penstock import Pipeline, Plan, Stage

torch.set_default_dtype(torch.float64)


def net():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = net(), net()
        self.teacher.requires_grad_(False)

    def forward(self, x, target):
        with torch.no_grad():
            soft = self.teacher(x).softmax(1)
        scores = self.student(x)
        return functional.cross_entropy(scores, target) + functional.cross_entropy(scores, soft)


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.2, momentum=0.9)


def move(teacher, student):
    with torch.no_grad():
        for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            ours.lerp_(theirs, 0.1)


torch.manual_seed(0)
model = Distilled()
batches = [{"x": torch.randn(8, 6), "target": torch.randint(4, (8,))} for _ in range(5)]

alone = copy.deepcopy(model)
optimizer = sgd(alone.parameters())
for batch in batches:
    optimizer.zero_grad()
    loss = alone(**batch)
    loss.backward()
    optimizer.step()
    move(alone.teacher, alone.student)

plan = Plan((Stage(range(2), (0,), (4,)), Stage(range(2, 5), (1,), (4,))), 2, 4, "1f1b")
with Pipeline(model, batches[0], plan=plan, optimizer=sgd) as pipe:
    pipe.print_with(lambda line: None)
    for batch in batches:
        metrics = pipe.step(batch)
        with pipe.full_model():
            move(model.teacher, model.student)
    with pipe.full_model(rank0_only=True):
        if pipe.rank == 0:
            torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()))
            print(f"loss {metrics.loss:.4f}, in one process {float(loss.detach()):.4f}")
