"""Job ``digits``: a convolutional net on scikit-learn's handwritten digits.

Its costs are uneven on purpose: the convolutions have most of the work and few parameters, the
dense part has most of the parameters and little work. Replicating everything would add up many
megabytes of gradients in every step, cutting everything into stages cannot balance the work, so
the cheapest plan has several replicas of the convolutions that feed fewer of the dense part.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from penstock.errors import BadInput
from penstock.train.job import Split

CHANNELS = 64
CONVOLUTIONS = 8
HIDDEN = 2048
CLASSES = 10
SIDE = 8
HELD_OUT = 360


class Convolution(nn.Module):
    """A residual 3x3 convolution that keeps the size of the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + functional.relu(self.convolve(image))


class DigitsNet(nn.Module):
    """Class scores of 8x8 images: convolutions at full size, then two dense layers."""

    def __init__(
        self, channels: int = CHANNELS, convolutions: int = CONVOLUTIONS, hidden: int = HIDDEN
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.convolutions = nn.Sequential(*(Convolution(channels) for _ in range(convolutions)))
        self.pool = nn.MaxPool2d(2)
        self.dense = nn.Linear(channels * (SIDE // 2) ** 2, hidden)
        self.output = nn.Linear(hidden, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.pool(self.convolutions(functional.relu(self.stem(image))))
        return self.output(functional.relu(self.dense(features.flatten(1))))


def build_model() -> nn.Module:
    """The model of the job."""
    return DigitsNet()


@cache
def images(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[n, 1, 8, 8]`` with values from 0 to 1, and their classes; the last 360 held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadInput(
            "job 'digits' needs scikit-learn, which is not installed; run: pip install scikit-learn"
        ) from None
    pixels, classes = load_digits(return_X_y=True)
    chosen = slice(-HELD_OUT, None) if split == "held-out" else slice(None, -HELD_OUT)
    image = torch.from_numpy(pixels[chosen]).float().view(-1, 1, SIDE, SIDE) / 16
    return image, torch.from_numpy(classes[chosen]).long()


def batches(
    split: Split, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Training: endless epochs, each in an order of its own; held out: once through, in order."""
    image, label = images(split)
    if split == "held-out":
        yield from zip(image.split(batch_size), label.split(batch_size), strict=True)
        return
    steps = len(image) // batch_size
    if not steps:
        raise BadInput(
            f"job 'digits' has {len(image)} training images, fewer than the batch size "
            f"{batch_size}; lower the batch size"
        )
    step = start_step
    while True:
        epoch, within = divmod(step, steps)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(image), generator=generator)
        rows = order[within * batch_size : (within + 1) * batch_size]
        yield image[rows], label[rows]
        step += 1
