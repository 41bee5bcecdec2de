"""Four small trainings on data that ships with installed packages, each a row of pieces.

Digits are scikit-learn's (1,797 images of 8 x 8 pixels), text is what every CPython has of its own
documentation. The pieces take about equally long, so that a cut into equal runs of them gives even
pipelines: of 1, 2, 4 and on digits 8 stages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import sqrt

import torch
from torch import nn
from torch.nn import functional

from penstock.examples import digits, gpt_text

DIGITS_PIECES = 8
TEXT_PIECES = 4
HIDDEN = 128
WIDTH = 48
SEQUENCE = 32
VOCABULARY = 256
HELD_OUT_WINDOWS = 256

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """Mean loss (nats) and accuracy over held-out samples, pixels or bytes."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Task:
    """A model in pieces, its data, and the loss of the last piece's output.

    ``train(seed, size)`` yields batches without end. ``updates`` and ``batch_size`` are those of a
    run.
    """

    name: str
    pieces: int
    updates: int
    batch_size: int
    build: Callable[[], list[nn.Module]]
    train: Callable[[int, int], Iterator[Batch]]
    held_out: Callable[[], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def score(self, modules: list[nn.Module]) -> Score:
        """Scores of ``modules``, in order, on the held-out samples."""
        inputs, target = self.held_out()
        with torch.no_grad():
            hidden = inputs
            for module in modules:
                hidden = module(hidden)
            right = (hidden.argmax(-1) == target).float().mean()
            return Score(float(self.loss(hidden, target)), float(right))


def stages_of(task: Task, stages: int, seed: int) -> list[nn.Module]:
    """A fresh model of ``task`` in ``stages`` equal runs of pieces.

    Raises:
        ValueError: ``stages`` does not divide the number of pieces.
    """
    if task.pieces % stages:
        raise ValueError(f"{stages} stages; {task.name} needs a divisor of {task.pieces}")
    torch.manual_seed(seed)
    pieces = task.build()
    each = task.pieces // stages
    return [nn.Sequential(*pieces[at : at + each]) for at in range(0, task.pieces, each)]


class Residual(nn.Module):
    """A residual branch behind a layer norm."""

    def __init__(self, branch: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.branch = branch

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.branch(self.norm(hidden))


class Recurrence(nn.Module):
    """One LSTM layer: the hidden states of all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, width, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.cells(hidden)[0]


def self_normalising() -> list[nn.Module]:
    """Eight dense layers with SELU and no shortcuts (Klambauer et al., NeurIPS 2017)."""
    widths = [digits.SIDE**2] + [HIDDEN] * (DIGITS_PIECES - 1)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        dense = nn.Linear(before, after)
        nn.init.normal_(dense.weight, std=1 / sqrt(before))
        nn.init.zeros_(dense.bias)
        layers.append(nn.Sequential(dense, nn.SELU()))
    return [*layers, nn.Linear(HIDDEN, digits.CLASSES)]


def convolutions() -> list[nn.Module]:
    """A stem, six residual 3 x 3 convolutions, and a dense head."""
    channels = 12
    stem = nn.Sequential(
        nn.Unflatten(1, (1, digits.SIDE, digits.SIDE)), nn.Conv2d(1, channels, 3, padding=1)
    )
    blocks = [digits.Convolution(channels) for _ in range(DIGITS_PIECES - 2)]
    head = nn.Sequential(
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * (digits.SIDE // 2) ** 2, digits.CLASSES),
    )
    return [stem, *blocks, head]


def transformer() -> list[nn.Module]:
    """Byte embedding, four pre-norm transformer blocks, logits of the next byte."""
    return text_model([gpt_text.TransformerBlock(WIDTH, 4) for _ in range(TEXT_PIECES)])


def residual_lstm() -> list[nn.Module]:
    """Byte embedding, four residual LSTM layers, logits of the next byte."""
    return text_model([Residual(Recurrence(WIDTH), WIDTH) for _ in range(TEXT_PIECES)])


def text_model(blocks: list[nn.Module]) -> list[nn.Module]:
    """``blocks``, an embedding before the first and the logits after the last."""
    first, *middle, last = blocks
    embedding = gpt_text.Embedding(VOCABULARY, SEQUENCE, WIDTH)
    output = nn.Linear(WIDTH, VOCABULARY, bias=False)
    pieces = [
        nn.Sequential(embedding, first),
        *middle,
        nn.Sequential(last, nn.LayerNorm(WIDTH), output),
    ]
    for piece in pieces:
        piece.apply(gpt_text.initialise)
    return pieces


def digit_batches(seed: int, size: int) -> Iterator[Batch]:
    """Endless batches: random images with replacement, those of a seed always the same."""
    pixels, classes = flat_digits("train")
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(pixels), (size,), generator=generator)
        yield pixels[rows], classes[rows]


def held_out_digits() -> Batch:
    """All held-out images."""
    return flat_digits("held-out")


@cache
def flat_digits(split: digits.Split) -> Batch:
    """Images as rows of 64 pixels, and their classes."""
    pixels, classes = digits.images(split)
    return pixels.flatten(1), classes


def text_batches(seed: int, size: int) -> Iterator[Batch]:
    """Endless batches of random windows: bytes, and the bytes that follow."""
    corpus = gpt_text.text("train").long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(corpus, torch.randint(len(corpus) - SEQUENCE, (size,), generator=generator))


@cache
def held_out_text() -> Batch:
    """Windows spread evenly over the held-out text."""
    corpus = gpt_text.text("held-out").long()
    return windows(corpus, torch.linspace(0, len(corpus) - SEQUENCE - 1, HELD_OUT_WINDOWS).long())


def windows(corpus: torch.Tensor, starts: torch.Tensor) -> Batch:
    """The bytes from each start on, and the same one byte later."""
    rows = corpus[starts[:, None] + torch.arange(SEQUENCE + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def class_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, over images or over all bytes."""
    return functional.cross_entropy(scores.flatten(0, -2), target.flatten())


TASKS: dict[str, Task] = {
    "digits-dense": Task(
        "digits-dense",
        DIGITS_PIECES,
        600,
        16,
        self_normalising,
        digit_batches,
        held_out_digits,
        class_loss,
    ),
    "digits-convolution": Task(
        "digits-convolution",
        DIGITS_PIECES,
        600,
        16,
        convolutions,
        digit_batches,
        held_out_digits,
        class_loss,
    ),
    "text-transformer": Task(
        "text-transformer",
        TEXT_PIECES,
        400,
        8,
        transformer,
        text_batches,
        held_out_text,
        class_loss,
    ),
    "text-lstm": Task(
        "text-lstm", TEXT_PIECES, 400, 8, residual_lstm, text_batches, held_out_text, class_loss
    ),
}
