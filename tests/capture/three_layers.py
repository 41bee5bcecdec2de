"""Three layers, after the first of which a test does something, and a batch for them."""

from typing import Any

import torch
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.nn import functional

SEEDED = torch.Generator().manual_seed(0)
BATCH = (
    torch.randn(6, 4, generator=SEEDED).double(),
    torch.randint(3, (6,), generator=SEEDED),
)


def keep(net: Any, values: Any) -> Any:
    return values


class Net(nn.Module):
    """Three layers, with ``between`` after the first."""

    def __init__(self, between: Any = keep, middle: nn.Module | None = None):
        super().__init__()
        self.first, self.middle = nn.Linear(4, 8), middle or nn.Linear(8, 8)
        self.last, self.between = nn.Linear(8, 3), between

    def forward(self, values: Any) -> Any:
        return self.last(torch.tanh(self.middle(self.between(self, self.first(values)))))


def compare(model: nn.Module, **options: Any) -> Any:
    """The graph of a model whose pipeline is compared with the plain module, in float64."""
    loss = functional.cross_entropy
    return assert_pipeline_equals_plain(model.double(), BATCH, loss=loss, **options)
