"""The models of the benchmark, as lists of blocks that both runtimes cut equally.

``tiny`` (8 x (Linear 32 -> 32, ReLU), 4 rows a micro-batch, mean squared error) takes so little
computing that an iteration is nearly all overhead. ``gpt`` has 8 pre-norm blocks of width 256,
4 heads, 128 positions, a vocabulary of 4096, and 2 sequences a micro-batch. ``gpt-head`` is the
same with a vocabulary of 16384, whose head takes as long as five blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = {"gpt": 4096, "gpt-head": 16384}
"""Words of the models of language."""


class Chain(nn.Sequential):
    """Blocks in a row, each of which gets all that the one before returns."""

    def forward(self, *state: torch.Tensor) -> Any:
        """The last block's result, one tensor or several."""
        for block in self:
            found = block(*state)
            state = found if isinstance(found, tuple) else (found,)
        return state if len(state) > 1 else state[0]


@dataclass(frozen=True)
class Model:
    """Blocks, the loss of the last one's result, and the rows of a micro-batch.

    ``batch_of`` makes rows: inputs of the first block, and the targets behind them. A block
    takes what the one before returns, one tensor or several.
    """

    blocks: list[nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rows: int
    batch_of: Callable[[int], tuple[torch.Tensor, ...]]

    def batch(self, micro_batches: int) -> tuple[torch.Tensor, ...]:
        """Inputs and targets of that many micro-batches."""
        return self.batch_of(self.rows * micro_batches)

    def halves(self) -> list[nn.Module]:
        """The same modules, with the two halves of a transformer's block apart: more cuts."""
        parts: list[nn.Module] = []
        for block in self.blocks:
            parts += list(block.children()) if isinstance(block, Block) else [block]
        return parts


class Attention(nn.Module):
    """Causal self-attention, added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(rows, length, width)`` to the same."""
        rows, length, width = hidden.shape
        joint = self.projections(self.norm(hidden)).view(rows, length, 3, self.heads, -1)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.output(mixed.transpose(1, 2).reshape(rows, length, width))


class Perceptron(nn.Module):
    """A two-layer perceptron, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(rows, length, width)`` to the same."""
        return hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))


class Block(nn.Sequential):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(Attention(width, heads), Perceptron(width))


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
        return Model(
            layers,
            functional.mse_loss,
            4,
            lambda rows: (torch.randn(rows, 32), torch.randn(rows, 32)),
        )
    words = VOCABULARY[name]

    def batch_of(rows: int) -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(0, words, (rows, 129))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    layers = [Embedding(words, 128, 256), *(Block(256, 4) for _ in range(blocks))]
    layers.append(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, words, bias=False)))
    return Model(layers, token_loss, 2, batch_of)
