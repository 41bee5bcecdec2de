"""Job ``resnet-digits``: a ResNet-20 with batch normalisation on scikit-learn's handwritten digits.

The net is that for small images of He et al., 2016 (section 4.2), twice as wide. Statistics are
those of each micro-batch; where a stage has replicas, they exchange them, which costs two small
sums for each normalisation and micro-batch.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from penstock.examples.digits import CLASSES

WIDTHS = (32, 64, 128)
BLOCKS = 3


class ResidualBlock(nn.Module):
    """Two normalised 3x3 convolutions beside a shortcut; the first may halve the image."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            projection = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(after))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.first_norm(self.first(image)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(image))


class ResNet(nn.Module):
    """Class scores of 8x8 images; with the defaults 20 layers deep."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        before = [widths[0], *(width for width in widths for _ in range(blocks))]
        self.blocks = nn.Sequential(
            *(ResidualBlock(narrow, wide) for narrow, wide in pairwise(before))
        )
        self.output = nn.Linear(widths[-1], CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.blocks(functional.relu(self.norm(self.stem(image))))
        return self.output(features.mean((2, 3)))


def build_model() -> nn.Module:
    """The model of the job."""
    return ResNet()
