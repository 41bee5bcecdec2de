"""Weights that a loss function reaches, and that are no part of the model."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput

BATCH = torch.randn(8, 6), torch.randint(4, (8,))


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, features, target):
        cosine = functional.linear(functional.normalize(features), self.weight)  # read here
        return functional.cross_entropy(cosine, target)


MARGIN, TEACHER = Margin(), nn.Linear(5, 5)
NUMBERS = torch.zeros(2, requires_grad=True)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


class Holder:
    def __init__(self, module):
        self.module = module

    def __call__(self, output, target):
        return self.module(output, target)


class Around(nn.Module):
    def forward(self, output, target):
        return MARGIN(output, target)


def by_default(output, target, margin=MARGIN):
    return margin(output, target)


def of(margin):
    return lambda output, target: margin(output, target)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: MARGIN(output, target),
        of(MARGIN),
        by_default,
        MARGIN.forward,
        Holder(MARGIN),
        Holder(MARGIN).__call__,
        functools.partial(lambda margin, output, target: margin(output, target), MARGIN),
        Around(),
        [(1.0, functional.cross_entropy), (0.5, of(MARGIN))],
    ],
    ids=["global", "closure", "default", "bound", "object", "method", "partial", "module", "list"],
)
def test_a_loss_function_that_hides_trained_weights_is_refused(loss):
    with pytest.raises(BadInput, match=r"'weight' of a Margin at .*read here.* loss=module"):
        capture_model(MODEL, BATCH, loss=loss)


def test_a_trained_tensor_that_no_module_holds_is_refused():
    def loss(output, target):
        return functional.cross_entropy(output, target) * NUMBERS[0].exp() + NUMBERS[0]

    with pytest.raises(BadInput, match=r"a tensor of shape \(2,\) at .*NUMBERS"):
        capture_model(MODEL, BATCH, loss=loss)


@pytest.mark.parametrize(
    "loss",
    [
        of(Margin().requires_grad_(False)),
        lambda o, t: functional.mse_loss(o, TEACHER(o.detach()).detach()),
        lambda o, t: functional.mse_loss(o, torch.no_grad()(lambda: TEACHER(o))()),
        lambda o, t: MARGIN.weight.detach().sum() + sum(p.sum() for p in MODEL.parameters()),
        lambda o, t: functional.cross_entropy(o, t) + torch.ones(2, requires_grad=True).sum(),
        Margin(),
    ],
    ids=["frozen", "detached", "without gradients", "the model's", "made within", "the module"],
)
def test_weights_that_get_no_gradient_are_the_users_own(loss):
    assert capture_model(MODEL, BATCH, loss=loss).layer_names
