"""Job ``gpt-text``: a small byte-level GPT on the English text that ships with every CPython."""

from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

from penstock.train.job import Split

VOCABULARY = 256
WIDTH = 192
HEADS = 4
BLOCKS = 4
SEQUENCE = 64


class Attention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al., NeurIPS 2017, section 3.2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        samples, length, width = hidden.shape
        split = self.query_key_value(hidden).view(samples, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(samples, length, width))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: attention, then a four times wider perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.perceptron(self.perceptron_norm(hidden))


class Embedding(nn.Module):
    """Sum of the embeddings of each byte and of its position."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.byte(tokens) + self.position


class Gpt(nn.Module):
    """Byte logits for every position, from the bytes up to it (GPT-2's architecture)."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        length: int = SEQUENCE,
        width: int = WIDTH,
        heads: int = HEADS,
        blocks: int = BLOCKS,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.apply(initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.blocks(self.embedding(tokens))))


def initialise(module: nn.Module) -> None:
    """Weights normal with deviation 0.02, biases zero (GPT-2), so that a fresh model guesses."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, Embedding):
        nn.init.normal_(module.position, std=0.02)


def build_model() -> nn.Module:
    """The model of the job."""
    return Gpt()


def next_byte_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions, in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@cache
def text(split: Split) -> torch.Tensor:
    """The bytes of every topic whose number ends in 7 (held out), or of the other nine tenths."""
    chosen = (
        f"{name}\n\n{topics[name]}\n\n"
        for number, name in enumerate(sorted(topics))
        if (number % 10 == 7) == (split == "held-out")
    )
    return torch.frombuffer(bytearray("".join(chosen).encode()), dtype=torch.uint8)


def windows(
    split: Split, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of text: ``(bytes, following bytes)``, each ``[samples, SEQUENCE]`` int64."""
    corpus = text(split).long()
    window = torch.arange(SEQUENCE + 1)
    step = start_step
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(corpus) - SEQUENCE, (batch_size, 1), generator=generator)
        rows = corpus[starts + window]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        step += 1
