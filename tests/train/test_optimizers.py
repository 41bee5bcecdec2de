"""The optimizers that job settings name are torch's own, with its options."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from penstock.errors import BadInput
from penstock.files import in_one_line
from penstock.train.job import OptimizerSettings
from penstock.train.optimizers import (
    MuonWithAdamW,
    optimizer_factory,
    state_bytes_per_parameter_byte,
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def stepped(own: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        own(x).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in own.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", ["fused", "foreach", "neither"])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adamw", lambda p: AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)),
        ("adam", lambda p: Adam(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)),
        ("sgd", lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1)),
    ],
)
def test_every_way_to_step_gives_what_torchs_optimizer_gives(
    name: Literal["adamw", "adam", "sgd"],
    theirs: Callable[..., torch.optim.Optimizer],
    way: str,
) -> None:
    settings = OptimizerSettings(
        name=name,
        learning_rate=0.01,
        weight_decay=0.1,
        fused=way == "fused",
        foreach=way == "foreach",
    )
    ours, reference = model(), model()
    optimizer = optimizer_factory(settings)(ours.named_parameters())
    assert all(group["fused"] == (way == "fused") for group in optimizer.param_groups)
    assert all(group["foreach"] == (way == "foreach") for group in optimizer.param_groups)
    assert_same(stepped(ours, optimizer), stepped(reference, theirs(reference.parameters())))


def test_muon_steps_matrices_and_adamw_the_rest_and_state_comes_back() -> None:
    settings = OptimizerSettings(name="muon", learning_rate=0.01, momentum=0.95)
    ours, reference, resumed = model(), model(), model()
    optimizer = optimizer_factory(settings)(ours.named_parameters())
    matrices = [p for p in reference.parameters() if p.dim() == 2]
    others = [p for p in reference.parameters() if p.dim() != 2]
    muon = torch.optim.Muon(
        matrices, lr=0.01, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = AdamW(others, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(4):
        reference.zero_grad()
        reference(x).square().sum().backward()
        muon.step()
        adamw.step()
    assert_same(stepped(ours, optimizer), [p.detach() for p in reference.parameters()])
    bytes = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    assert bytes == sum(p.nbytes for p in matrices) + 2 * sum(p.nbytes for p in others)
    resumed.load_state_dict(ours.state_dict())
    again = optimizer_factory(settings)(resumed.named_parameters())
    assert isinstance(again, MuonWithAdamW)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(stepped(resumed, again), stepped(ours, optimizer), rtol=0, atol=0)


def names_of(optimizer: torch.optim.Optimizer, own: nn.Module) -> list[list[str]]:
    """The names of each group's parameters."""
    names = {parameter: name for name, parameter in own.named_parameters()}
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def test_parameters_have_settings_by_patterns_of_their_names() -> None:
    settings = OptimizerSettings(
        weight_decay=0.1,
        learning_rate=0.01,
        no_decay=("*.bias",),
        groups=({"parameters": "2.*", "learning_rate": 0.5}, {"parameters": ["none.*"]}),
    )
    ours, reference = model(), model()
    optimizer = optimizer_factory(settings)(ours.named_parameters())
    assert names_of(optimizer, ours) == [["0.weight"], ["2.weight", "2.bias"], [], ["0.bias"]]
    theirs = AdamW(
        [
            {"params": [reference[0].weight]},
            {"params": list(reference[2].parameters()), "lr": 0.5},
            {"params": [reference[0].bias], "weight_decay": 0.0},
        ],
        lr=0.01,
        weight_decay=0.1,
        betas=(0.9, 0.95),
    )
    assert_same(stepped(ours, optimizer), stepped(reference, theirs))


def test_any_class_of_optimizers_is_made_with_its_arguments() -> None:
    settings = OptimizerSettings(
        name="torch.optim:NAdam", learning_rate=0.01, arguments={"momentum_decay": 0.1}
    )
    ours, reference = model(), model()
    optimizer = optimizer_factory(settings)(ours.named_parameters())
    theirs = torch.optim.NAdam(reference.parameters(), lr=0.01, momentum_decay=0.1)
    assert_same(stepped(ours, optimizer), stepped(reference, theirs))


@pytest.mark.parametrize(
    ("name", "arguments", "least", "most"),
    [
        ("torch.optim:NAdam", {}, 2.0, 2.0),
        ("torch.optim:Adafactor", {}, 0.0, 0.05),
        ("torch.optim:RMSprop", {"momentum": 0.9}, 2.0, 2.0),
        ("torch.optim:SGD", {}, 0.0, 0.0),
    ],
)
def test_what_a_class_keeps_is_found_by_trying_it(
    name: str, arguments: dict[str, float], least: float, most: float
) -> None:
    settings = OptimizerSettings(name=name, arguments=arguments)
    assert least <= state_bytes_per_parameter_byte(settings) <= most


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"name": "torch.optim:LBFGS"}, "computes the loss again"),
        ({"name": "torch.optim:Optimizr"}, "has no"),
        ({"name": "torch.nn:Linear"}, "no class of optimizers"),
        ({"name": "adamww"}, "did you mean 'adamw'?"),
        ({"arguments": {"amsgrad": True}}, "optimizer.arguments are for a class"),
        ({"groups": ({"weight_decay": 0.0},)}, "has no parameters"),
    ],
)
def test_what_cannot_step_here_is_refused_in_a_line(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput) as refused, in_one_line():
        OptimizerSettings(**keys)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_arguments_that_a_class_lacks_and_groups_of_muon_are_refused() -> None:
    for settings, told in (
        (OptimizerSettings("torch.optim:NAdam", arguments={"betaz": 1}), "betaz"),
        (OptimizerSettings("muon", no_decay=("*.bias",)), "groups of its own"),
    ):
        with pytest.raises(BadInput, match=told):
            optimizer_factory(settings)(model().named_parameters())
