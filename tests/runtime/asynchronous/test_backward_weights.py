"""A backward sees the weights that its rule prescribes, whatever autograd has saved of them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from penstock.runtime.asynchronous.weight_versions import WeightVersions, make_weight_versions
from penstock.schedule.weight_rule import WeightRule

VANILLA = WeightRule(1)
STASH = WeightRule(1, version="forward")
# From momentum: the forward one step ahead, the backward two.
PREDICTED = WeightRule(1, (2,), "momentum", (1,), (2,))
RATE = 0.1


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def number(*shape: int) -> torch.Tensor:
    return torch.randint(0, 7, shape)


class Recurrent(nn.Module):
    """A recurrent layer that returns its outputs alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        return result[0] if isinstance(result, tuple) else result


LINEAR_IN_THE_WEIGHTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: normal(5, 4)),
    "linear over three dimensions": (lambda: nn.Linear(4, 3), lambda: normal(2, 5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), lambda: normal(5, 4)),
    "embedding": (lambda: nn.Embedding(7, 3), lambda: number(4, 5)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1), lambda: normal(2, 2, 5, 5)),
    "grouped convolution": (lambda: nn.Conv1d(4, 4, 3, groups=2), lambda: normal(2, 4, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 3, 3), lambda: normal(2, 2, 6)),
    "layer norm": (lambda: nn.LayerNorm(4), lambda: normal(5, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: normal(5, 4, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(4), lambda: normal(5, 4)),
}
"""Layers whose gradients, for a given input, are those of the same layer with other weights."""

OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "recurrent cell": (lambda: nn.RNNCell(4, 3), lambda: normal(5, 4)),
    "gated cell": (lambda: nn.GRUCell(4, 3), lambda: normal(5, 4)),
    "memory cell": (lambda: Recurrent(nn.LSTMCell(4, 3)), lambda: normal(5, 4)),
    "recurrent layers": (lambda: Recurrent(nn.LSTM(4, 3, num_layers=2)), lambda: normal(6, 2, 4)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: normal(2, 3, 4),
    ),
    "tied": (lambda: TiedLayers(), lambda: normal(5, 4)),
}


class TiedLayers(nn.Module):
    """The same parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


EVERY = LINEAR_IN_THE_WEIGHTS | OTHERS


def made(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module, batch = EVERY[kind]
    layer = module().double()
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return layer, batch()


def versions_of(layer: nn.Module, rule: WeightRule) -> WeightVersions:
    optimizer = SGD(layer.parameters(), lr=RATE, momentum=0.9)
    for parameter in layer.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
    return make_weight_versions(layer, rule, 0, optimizer)


def move(layer: nn.Module) -> list[torch.Tensor]:
    """Change the parameters in place, as an optimizer does; what they were."""
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    return before


def gradients(
    layer: nn.Module, weights: list[torch.Tensor], batch: torch.Tensor, seed: torch.Tensor
) -> list[torch.Tensor]:
    """Plain autograd's of a copy of the layer with ``weights``: of its input, of its weights."""
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter, weight in zip(plain.parameters(), weights, strict=True):
            parameter.copy_(weight)
    entered = batch.clone()
    wanted = list(plain.parameters())
    if entered.is_floating_point():
        wanted = [entered.requires_grad_(), *wanted]
    return list(torch.autograd.grad(plain(entered), wanted, seed))


def passed(
    layer: nn.Module, versions: WeightVersions, batch: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """A forward, an update, the backward: gradients, the seed, the weights before the update."""
    entered = batch.clone()
    if entered.is_floating_point():
        entered.requires_grad_()
    with versions.forward(0):
        output = layer(entered)
    seed = torch.randn_like(output)
    before: list[torch.Tensor] = []
    versions.update(lambda: before.extend(move(layer)))
    for parameter in layer.parameters():
        parameter.grad.zero_()
    with versions.backward(0):
        output.backward(seed)
    found = [parameter.grad for parameter in layer.parameters()]
    return ([entered.grad, *found] if entered.is_floating_point() else found), seed, before


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", EVERY)
def test_a_kept_version_is_what_both_passes_see(kind: str) -> None:
    layer, batch = made(kind)
    found, seed, before = passed(layer, versions_of(layer, STASH), batch)
    assert not any(map(torch.equal, before, layer.parameters()))
    assert_equal(found, gradients(layer, before, batch, seed))


@pytest.mark.parametrize("kind", LINEAR_IN_THE_WEIGHTS)
@pytest.mark.parametrize("rule", [VANILLA, PREDICTED], ids=["newest", "predicted"])
def test_without_versions_a_backward_sees_weights_of_its_own_moment(
    rule: WeightRule, kind: str
) -> None:
    layer, batch = made(kind)
    versions = versions_of(layer, rule)
    found, seed, _ = passed(layer, versions, batch)
    expected = [parameter.detach() for parameter in layer.parameters()]
    if rule is PREDICTED:
        state = versions._steps._optimizer.state
        expected = [p.detach() - 2 * RATE * state[p]["momentum_buffer"] for p in layer.parameters()]
    assert_equal(found, gradients(layer, expected, batch, seed))


def test_a_recurrent_cell_has_the_activations_of_its_forward_and_the_weights_of_its_backward() -> (
    None
):
    layer, batch = made("recurrent cell")
    found, seed, before = passed(layer, versions_of(layer, VANILLA), batch)
    into, recurrent, bias_into, bias_recurrent = before
    output = torch.tanh(batch @ into.T + bias_into + bias_recurrent)
    inner = seed * (1 - output**2)
    now = [parameter.detach() for parameter in layer.parameters()]
    zero_state = torch.zeros_like(recurrent)
    expected = [inner @ now[0], inner.T @ batch, zero_state, inner.sum(0), inner.sum(0)]
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", EVERY)
def test_forwards_run_with_their_prediction_and_leave_the_parameters_alone(kind: str) -> None:
    layer, batch = made(kind)
    versions = versions_of(layer, PREDICTED)
    state = versions._steps._optimizer.state
    parameters = list(layer.parameters())
    ahead = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter, own in zip(ahead.parameters(), parameters, strict=True):
            parameter.copy_(own - RATE * state[own]["momentum_buffer"])
    with versions.forward(0):
        output = layer(batch)
    assert torch.allclose(output, ahead(batch), rtol=1e-12, atol=1e-12)
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))


def test_several_micro_batches_in_flight_keep_their_own_versions() -> None:
    layer, batch = made("recurrent layers")
    versions = versions_of(layer, STASH)
    outputs, weights = [], []
    for m in range(3):
        weights.append([p.detach().clone() for p in layer.parameters()])
        with versions.forward(m):
            outputs.append(layer(batch))
        if m < 2:
            versions.update(lambda: move(layer))
    assert versions.copies == 3
    seed = torch.randn_like(outputs[0])
    for m, output in enumerate(outputs):
        for parameter in layer.parameters():
            parameter.grad.zero_()
        with versions.backward(m):
            output.backward(seed)
        found = [parameter.grad.clone() for parameter in layer.parameters()]
        assert_equal(found, gradients(layer, weights[m], batch, seed)[1:])
        versions.update(lambda: move(layer))
    assert versions.copies == 1
    assert versions.most_copies == 3
