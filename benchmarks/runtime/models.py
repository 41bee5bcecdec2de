"""The two models of the benchmark, as lists of blocks that both runtimes cut alike.

``tiny`` (8 x (Linear 32 -> 32, ReLU), 4 rows a micro-batch, mean squared error) takes so little
computing that an iteration is nearly all overhead. ``gpt`` has 8 pre-norm blocks of width 256,
4 heads, 128 positions, a vocabulary of 4096, and 2 sequences a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Model", "make_model"]


@dataclass(frozen=True)
class Model:
    """Blocks, the loss of the last one's output, and the rows of a micro-batch."""

    name: str
    blocks: list[nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rows: int

    def batch(self, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of that many micro-batches."""
        rows = self.rows * micro_batches
        if self.name == "tiny":
            return torch.randn(rows, 32), torch.randn(rows, 32)
        tokens = torch.randint(0, 4096, (rows, 129))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attention, then a two-layer perceptron, each added to its input."""
        rows, length, width = hidden.shape
        joint = self.projections(self.first_norm(hidden)).view(rows, length, 3, self.heads, -1)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.narrow(functional.gelu(self.wide(self.second_norm(hidden))))


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed ``(rows, length)`` tokens."""
        return self.token(tokens) + self.position.weight


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_model(name: str, blocks: int = 8) -> Model:
    """The model of that name, with the same weights in every process."""
    torch.manual_seed(0)
    if name == "tiny":
        layers: list[nn.Module] = [
            nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(blocks)
        ]
        return Model(name, layers, functional.mse_loss, 4)
    layers = [Embedding(4096, 128, 256), *(Block(256, 4) for _ in range(blocks))]
    layers.append(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 4096, bias=False)))
    return Model(name, layers, token_loss, 2)
