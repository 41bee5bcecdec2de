"""A model whose batches are of two kinds: with a picture, which has layers of its own, or without.

words | look.0 | look.1 | blocks.0 | blocks.1 | blocks.2 | head | loss
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH = 11, 8
LAYERS = ("words", "look.0", "look.1", "blocks.0.0", "blocks.1.0", "blocks.2.0", "head", "loss")

Batch = dict[str, torch.Tensor]


class Captions(nn.Module):
    """Scores for words, with what a picture adds to each if there is one."""

    share: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.look = nn.ModuleList([nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.look[0].register_buffer("own", torch.zeros(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, words: torch.Tensor, picture: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(words)
        if picture is not None:
            seen = self.look[1](self.look[0](picture).relu()).relu()
            x = x + self.share * seen[:, None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def captions() -> Captions:
    torch.manual_seed(3)
    return Captions().double()


def loss_of(scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Labels are in the batch; those below 0 do not count."""
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def batch_of(kind: int, samples: int = 6, seed: int = 0, length: int = 5) -> Batch:
    """A batch with a picture (kind 0) or without (kind 1)."""
    source = torch.Generator().manual_seed(seed)
    words = torch.randint(0, VOCABULARY, (samples, length), generator=source)
    labels = words.roll(-1, 1)
    labels[::2, -1] = -100
    batch = {"words": words, "labels": labels}
    if kind == 0:
        batch["picture"] = torch.randn(samples, 6, dtype=torch.float64, generator=source)
    return batch


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One step of plain torch; returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(scores_of(model, batch), batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def scores_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the model gives for a batch."""
    return model(**{key: batch[key] for key in ("words", "picture") if key in batch})


def decaying(parameters: Any) -> torch.optim.Optimizer:
    """With momentum and weight decay, which would move parameters with a gradient of zero."""
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3)
