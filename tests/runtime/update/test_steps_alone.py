"""Optimizers and schedules whose step needs more than it gets are refused before a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from penstock.errors import BadInput
from penstock.runtime.options import Options
from penstock.runtime.update.training import Training


class OfTwo:
    def __init__(self, optimizer: Optimizer) -> None: ...

    def step(self, one: float, other: float) -> None: ...


def training(make: Callable[..., Optimizer], schedule: Callable[..., Any]) -> Training:
    own = [("weight", nn.Parameter(torch.ones(2)))]
    options = Options(optimizer=lambda p: make(p, lr=0.1), learning_rate_schedule=schedule)
    return Training([own], torch.device("cpu"), options)


def test_a_step_that_needs_more_is_refused() -> None:
    with pytest.raises(BadInput, match=r"LBFGS.step\(\) is called without arguments .*'closure'"):
        training(LBFGS, lambda optimizer: None)
    with pytest.raises(BadInput, match=r"OfTwo.step\(\) .*'other'.* one metric"):
        training(SGD, OfTwo)


def test_other_optimizers_and_schedules_are_made() -> None:
    made = training(AdamW, lambda optimizer: OneCycleLR(optimizer, 1.0, 10))
    assert isinstance(made.schedule, OneCycleLR) and not made.follows
    assert training(SGD, ReduceLROnPlateau).follows == "ReduceLROnPlateau"
