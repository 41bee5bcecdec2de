"""Odd things that models do: each right, as in the plain module, or refused in a line."""

import collections
import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from capture import three_layers
from capture.three_layers import BATCH, compare, keep
from plain_training import assert_pipeline_equals_plain, in_two_stages
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import CaptureFailed

STEPS = 0
NOTES: list[float] = []


class Net(three_layers.Net):
    """Three layers with state; ``change`` is done to them at first."""

    def __init__(self, between: Any = keep, change: Any = None):
        super().__init__(between)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.started, self.kept = False, None
        self.history = collections.deque[float]()
        self.numbers = np.random.default_rng(0)
        if change:
            change(self)
        self.double()


# right


def kept_for_itself(net: Any, h: Any) -> Any:
    net.kept = torch.tanh(h)
    return h + net.kept


def gradient_within(net: Any, h: Any) -> Any:
    x = torch.sin(h)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return h + gradient


def detached_by_data(net: Any, h: Any) -> Any:
    """Reads and writes through ``.data``, as autograd does not hear of."""
    net.middle.weight.data.clamp_(-0.2, 0.2)
    with_nan = h.data.clone()
    with_nan[:, 0] = float("nan")
    return h * (1 + h.data.abs().max(1, keepdim=True).values) + with_nan.nan_to_num().mul(0)


def made_once(net: Any, h: Any) -> Any:
    if net.kept is None:
        net.kept = torch.linspace(1, 2, 8, dtype=h.dtype)
    return h * net.kept


def seeded_chance(net: Any, h: Any) -> Any:
    np.random.seed(3)
    return h * float(np.random.rand())


def two_names(net: Any) -> None:
    net.again, net.alias = net.middle, net.first.weight


@functools.cache
def scripted() -> Any:
    return torch.jit.script(fused)


def fused(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * torch.tanh(x) + factor


def in_place_without_a_name(net: Any, h: Any) -> Any:
    """What the calls return is not used: the tensor itself is, which another stage has made."""
    h.mul_(0.5)
    h.add_(1.0)
    return h


RIGHT = {
    "in place without a name": (in_place_without_a_name,),
    "a tensor kept for itself": (kept_for_itself, None),
    "a constant made in the first call": (made_once, None),
    "a gradient within forward": (gradient_within, None),
    "chance from a fixed seed": (seeded_chance, None),
    "complex activations": (
        lambda net, h: torch.fft.ifft(torch.fft.fft(torch.complex(h, torch.sin(h))) * 2).real,
        None,
    ),
    "a module and a tensor under two names": (
        lambda net, h: net.again(h) + h @ net.alias @ net.alias.t(),
        two_names,
    ),
    "whole numbers as a parameter": (
        lambda net, h: h * net.numbers,
        lambda net: setattr(net, "numbers", nn.Parameter(torch.arange(8), requires_grad=False)),
    ),
    "reads and writes through .data": (
        detached_by_data,
        lambda net: net.middle.weight.data.clamp_(-0.2, 0.2),
    ),
    "a scripted function": (lambda net, h: scripted()(net.middle(scripted()(h, 0.5)), 0.1), None),
    "weight_norm": (keep, lambda net: nn.utils.parametrizations.weight_norm(net.middle)),
    "the old weight_norm": (keep, lambda net: nn.utils.weight_norm(net.middle)),
    "orthogonal": (keep, lambda net: nn.utils.parametrizations.orthogonal(net.middle)),
}


@pytest.mark.filterwarnings("ignore:`torch")
@pytest.mark.parametrize("name", RIGHT)
def test_it_is_right(name: str) -> None:
    compare(Net(*RIGHT[name]))


class Complex(nn.Module):
    """Complex weights and activations, also where the model is cut."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8, dtype=torch.complex128)
        self.phases = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.middle = nn.Linear(8, 8, dtype=torch.complex128)
        self.last = nn.Linear(8, 3).double()

    def forward(self, values: Any) -> Any:
        h = self.first(values.to(torch.complex128)) * self.phases
        return self.last(self.middle(h).abs())


def test_complex_activations_cross_between_stages() -> None:
    graph = compare(Complex())
    assert graph.crossings[0][0].dtype is torch.complex128


class Words(nn.Module):
    """Words looked up in tables with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8, sparse=True)
        self.bags = nn.EmbeddingBag(12, 8, sparse=True, mode="sum")
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, words: Any) -> Any:
        return self.last(torch.tanh(self.middle(self.words(words).mean(1) + self.bags(words))))


def test_sparse_gradients_of_embeddings_are_right() -> None:
    batch = (torch.randint(12, (6, 5)), BATCH[1])
    assert_pipeline_equals_plain(Words(), batch, loss=functional.cross_entropy)


# right micro-batch by micro-batch, as samples are mixed


def updated_by_hand(net: Any, h: Any) -> Any:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        net.count += 1
    net.variance = 0.9 * net.variance + 0.1 * h.detach().var(0)
    return (h - net.mean) / net.variance + net.count


def normed(*statistics: str) -> Any:
    def between(net: Any, h: Any) -> Any:
        mean, variance = (getattr(net, name) for name in statistics) if statistics else (None, None)
        return functional.batch_norm(h, mean, variance, training=True)

    return between


MIXING = {
    "buffers updated by hand": (updated_by_hand, None),
    "batch_norm without statistics": (normed(), None),
    "batch_norm with statistics": (normed("mean", "variance"), None),
    "spectral_norm": (keep, lambda net: nn.utils.parametrizations.spectral_norm(net.middle)),
    "the old spectral_norm": (keep, lambda net: nn.utils.spectral_norm(net.middle)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
@pytest.mark.parametrize("name", MIXING)
def test_it_is_right_micro_batch_by_micro_batch(name: str) -> None:
    model = Net(*MIXING[name])
    compare(model, per_micro_batch=True)
    compare(Net(*MIXING[name]), micro_batches=1)
    compare(Net(*MIXING[name]), per_micro_batch=True, recompute=True)


def unread(net: Any, h: Any) -> Any:
    """Updates that nothing reads in the same call."""
    with torch.no_grad():
        net.count += 1
        net.mean[2:] += h.detach().mean(0)[2:]
    net.variance = 0.9 * net.variance + 0.1 * h.detach().var(0)
    return h


@pytest.mark.parametrize("between", [unread, updated_by_hand])
def test_buffers_updated_by_hand_are_as_in_the_plain_module(between: Any) -> None:
    model = Net(between)
    plain = Net(between)
    plain.load_state_dict(model.state_dict())
    graph = capture_model(model, BATCH, loss=functional.cross_entropy)
    for name, buffer in Net().named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))
    stages = [graph.stage(range(k, k + 1)) for k in range(len(graph.layer_names))]
    stage: Any = graph.stage(range(len(stages))).module
    for _ in range(2):
        plain(BATCH[0])
        stage(*BATCH)
    for name, buffer in plain.named_buffers():
        assert not torch.equal(buffer, Net().get_buffer(name))
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-12, atol=0)
    holders = [s for s in stages if "mean" in dict(s.module.named_buffers())]
    assert len(holders) == 1  # what is made of activations is its stage's


# state of Python: kept for each stage, or refused


def begins(net: Any, h: Any) -> Any:
    if not net.started:
        net.started = True
        return h * 2
    return h


def assigned_on_first_sight(net: Any, h: Any) -> Any:
    """Branches on a buffer that it assigns: for the second micro-batch otherwise."""
    if net.count == 0:
        net.mean = net.mean + h.detach().mean(0)
    net.count = net.count + 1
    return h * net.count + net.mean


KEPT_APART = {
    "a flag": begins,
    "a buffer that is assigned once": assigned_on_first_sight,
}


@pytest.mark.parametrize("name", KEPT_APART)
def test_state_that_changes_is_as_in_the_plain_module(name: str) -> None:
    model = Net(KEPT_APART[name])
    compare(model, per_micro_batch=True)
    again = Net(KEPT_APART[name])
    capture_model(again, BATCH, loss=functional.cross_entropy)
    assert (again.started, float(again.count)) == (False, 0)


def counts_globally(net: Any, h: Any) -> Any:
    global STEPS
    STEPS += 1
    return h


SHARED = {
    "Net.history": lambda net, h: (net.history.append(1.0), h * len(net.history))[1],
    "Net.numbers": lambda net, h: h * float(net.numbers.random()),
    f"{__name__}.STEPS": counts_globally,
    f"{__name__}.NOTES": lambda net, h: (NOTES.append(0.5), h * sum(NOTES))[1],
}


@pytest.mark.parametrize("name", SHARED)
def test_state_that_every_stage_would_change_is_refused_and_put_back(name: str) -> None:
    model = Net(SHARED[name])
    with pytest.raises(CaptureFailed, match=f"^{name} cannot be captured: forward changes") as told:
        capture_model(model, BATCH, loss=functional.cross_entropy)
    assert "register_buffer" in str(told.value) and "\n" not in str(told.value)
    assert not model.history
    assert (STEPS, NOTES) == (0, [])


def test_a_container_that_is_first_met_deep_down_is_told_by_its_name() -> None:
    model = Net(SHARED["Net.history"])
    held = model.history
    del model.history
    model.above, model.history = [[[held]]], held
    with pytest.raises(CaptureFailed, match=r"^Net\.history cannot be captured: forward "):
        capture_model(model, BATCH, loss=functional.cross_entropy)
    assert not held


class Permutes(nn.Module):
    """Permutes words, scales by chance, and takes both back when other stages have run."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, words: Any) -> Any:
        order, factor = torch.from_numpy(np.random.permutation(5)), 1 + random.random()
        h = torch.tanh(self.first(words))[:, order]
        h = torch.relu(self.middle(h)) * factor
        return self.last(h / factor)[:, order.argsort()].mean(1)


def test_all_stages_draw_the_same_outside_of_torch_and_the_users_generators_stay() -> None:
    batch = (torch.randn(6, 5, 4).double(), BATCH[1])
    before = random.getstate(), np.random.get_state()[1].tolist()
    capture_model(Permutes().double(), batch, loss=functional.cross_entropy)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert_pipeline_equals_plain(Permutes().double(), batch, loss=functional.cross_entropy)


class Scaled(Net):
    """Scales by a number drawn between modules; if ``cancels``, the next stage undoes it."""

    def __init__(self, *, cancels: bool) -> None:
        super().__init__()
        self.cancels = cancels

    def forward(self, values: Any) -> Any:
        factor = 1 + torch.rand((), dtype=torch.float64)
        hidden = self.middle(self.first(values) * factor)
        if self.cancels:
            hidden = (hidden - self.middle.bias) / factor + self.middle.bias
        return self.last(torch.tanh(hidden))


def steps_of(model: nn.Module, seed: int = 0) -> list[float]:
    """Losses of three steps on one batch, without training, in two stages."""
    torch.manual_seed(seed)
    graph = capture_model(model, BATCH, loss=functional.cross_entropy)
    make = functools.partial(torch.optim.SGD, lr=0.0)
    pipe = in_two_stages(graph, BATCH, rows=3, optimizer=make, verify="off")
    return [pipe.step(BATCH).loss for _ in range(3)]


def test_what_is_drawn_between_modules_is_alike_in_all_stages_and_differs_from_step_to_step() -> (
    None
):
    model = Scaled(cancels=True)
    expected = float(functional.cross_entropy(model(BATCH[0]), BATCH[1]).detach())
    assert steps_of(model) == pytest.approx([expected] * 3, rel=1e-12)
    drawn = steps_of(Scaled(cancels=False))
    assert len(set(drawn)) == 3


def test_what_the_model_held_before_is_there_after_capture() -> None:
    model = Net(kept_for_itself)
    mark: Any = torch.ones(8)
    model.kept = mark
    capture_model(model, BATCH, loss=functional.cross_entropy)
    assert model.kept is mark


def penalty(net: Any, h: Any) -> Any:
    inner = torch.tanh(net.middle(h)).sum()
    (gradient,) = torch.autograd.grad(inner, h, create_graph=True)
    return h + gradient


def test_no_cut_is_made_within_a_gradient_of_forward() -> None:
    graph = compare(Net(penalty))
    assert graph.layer_names == ("first", "middle", "middle#2", "last", "loss")
