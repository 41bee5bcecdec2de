"""Pictures as single models take them: patches, tiles, several sizes, channels last."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

SIDE = 4
"""Patches along a side of a picture."""

Parts = dict[str, Any]
Special = Callable[[Any, torch.Tensor], Parts]


def special_pictures(
    model: nn.Module, names: set[str], vision: Any, pictures: torch.Tensor
) -> Iterator[tuple[str, Parts]]:
    """Inputs for the arguments of forward; ``pictures`` are samples x channels x high x wide."""
    for argument, kind, made in _BY_ARGUMENT:
        if argument in names:
            yield kind, made(vision, pictures)
    own = _BY_MODEL.get(type(model).__name__)
    if own is not None:
        kind, made = own
        yield kind, made(vision, pictures)


def _patches(vision: Any, pictures: torch.Tensor) -> Parts:
    """Patches of every sample in a row, as many as the picture's sides need."""
    samples, channels = pictures.shape[:2]
    size = channels * vision.patch_size**2
    made = torch.Generator().manual_seed(2)
    return {
        "pixel_values": torch.randn(samples, SIDE * SIDE, size, generator=made),
        "pixel_attention_mask": torch.ones(samples, SIDE * SIDE, dtype=torch.long),
        "spatial_shapes": torch.full((samples, 2), SIDE),
    }


def _two_sizes(vision: Any, pictures: torch.Tensor) -> Parts:
    return {"pixel_values": pictures, "high_res_pixel_values": pictures.flip(-1)}


def _tiles(vision: Any, pictures: torch.Tensor) -> Parts:
    mask = torch.ones(pictures.shape[0], 1, dtype=torch.bool)
    return {"pixel_values": pictures.unsqueeze(1), "pixel_attention_mask": mask}


def _channels_last(vision: Any, pictures: torch.Tensor) -> Parts:
    side, time = vision.patch_size, vision.temporal_patch_size
    part = pictures[:, :, :side, :side].permute(0, 2, 3, 1)
    return {"pixel_values": part.unsqueeze(1).repeat(1, time, 1, 1, 1)}


def _crops(vision: Any, pictures: torch.Tensor) -> Parts:
    """One crop a sample in patches; every word of the picture is one patch."""
    samples, channels = pictures.shape[:2]
    made = torch.Generator().manual_seed(2)
    size = channels * vision.patch_size**2
    return {
        "pixel_values": torch.randn(samples, SIDE * SIDE, size, generator=made),
        "image_token_pooling": torch.arange(samples * SIDE * SIDE).view(-1, 1),
        "image_grids": torch.tensor([[SIDE, SIDE, 0, 0]] * samples),
    }


_BY_ARGUMENT: tuple[tuple[str, str, Special], ...] = (
    ("spatial_shapes", "patches of a picture", _patches),
    ("high_res_pixel_values", "pictures of two sizes", _two_sizes),
    ("tile_fine_mask", "tiles of pictures", _tiles),
)

_BY_MODEL: dict[str, tuple[str, Special]] = {
    "InklingForConditionalGeneration": ("picture, channels last", _channels_last),
}
