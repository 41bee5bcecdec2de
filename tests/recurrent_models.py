"""A model whose code runs from word to word, so that its calls depend on the length."""

import torch
from torch import nn
from torch.nn import functional

from penstock.capture.batch.lengths import Dynamic

VOCABULARY, WIDTH = 13, 4
DYNAMIC: Dynamic = {"tokens": {1: "length"}, "labels": {1: "length"}}


class Recurrent(nn.Module):
    """Runs from word to word in Python, with a number for each place that is made for the length.

    Words that are no words (0) change nothing that comes before them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.take = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        length = words.shape[1]
        places = torch.tensor([1.0 / (2 + place) for place in range(length)], dtype=words.dtype)
        state, states = torch.zeros_like(words[:, 0]), []
        for place in range(length):
            state = torch.tanh(self.keep(state) + self.take(words[:, place]) * places[place])
            states.append(state)
        return words + torch.stack(states, 1)


class Tagger(nn.Module):
    """Recurrent blocks between an embedding and a head that is tied to it; a parameter on top."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1), persistent=False)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Recurrent() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            words = block(words)
        return self.head(words)


def tagger(blocks: int = 3) -> Tagger:
    torch.manual_seed(5)
    return Tagger(blocks).double()


def loss_of(scores: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def batch_of(length: int, samples: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * seed + length)
    tokens = torch.randint(1, VOCABULARY, (samples, length), generator=source)
    words = torch.randint(1, length + 1, (samples, 1), generator=source)
    tokens = tokens.masked_fill(torch.arange(length) >= words, 0)
    return {"tokens": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}
