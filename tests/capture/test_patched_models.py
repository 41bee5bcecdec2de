"""Models that users patch: forwards and hooks that hold the model in a closure or by a global."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture.construct_cases import Block
from capture.three_layers import compare
from torch import nn

NAMES = ("0.up", "0.down", "1.up", "1.down", "2", "loss")


def forward_of_the_block(model: Any) -> None:
    """A closure over the old forward."""
    old = model[0].forward
    model[0].forward = lambda x: 2 * old(x)


def other_forward(model: Any) -> None:
    """A function that holds the module."""
    block = model[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return block.down(torch.tanh(block.up(x)))

    block.forward = forward


def forward_of_the_model(model: Any) -> None:
    """Of the whole model, as a partial function of a function that is wrapped."""

    def shifted(old: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return old(x) + 1

    model.forward = functools.partial(shifted, model.forward)


def forward_of_a_layer(model: Any) -> None:
    """Of one layer, with its neighbour's weight."""
    layer, other = model[1].up, model[1].down
    old = layer.forward
    layer.forward = lambda x: old(x) * other.weight.mean()


def hook(model: Any) -> None:
    """A forward hook that reads another module."""
    other = model[1]
    model[0].register_forward_hook(lambda module, given, made: made + other.up.weight.sum())


MODEL: Any = None


def forward_by_a_global(model: Any) -> None:
    """A function that finds the model by its name in the script."""
    global MODEL
    MODEL = model
    model[0].forward = lambda x: MODEL[0].down(MODEL[0].up(x)) * MODEL[2].weight.mean()


@pytest.mark.parametrize(
    "patch",
    [
        forward_of_the_block,
        other_forward,
        forward_of_the_model,
        forward_of_a_layer,
        hook,
        forward_by_a_global,
    ],
)
def test_a_patched_model_is_cut_and_trained_as_it_is(patch: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(4), Block(4), nn.Linear(4, 3)).double()
    patch(model)
    assert compare(model).layer_names == NAMES
