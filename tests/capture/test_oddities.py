"""Odd things that models do: each right, as in the plain module, or refused with the line."""

import collections
import copy
import datetime
import random
import sys
import time
from datetime import datetime as moment
from random import random as chance
from typing import Any

import numpy as np
import pytest
import torch
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.capture.evaluation import set_training
from penstock.capture.trace import capture_model
from penstock.errors import CaptureFailed

torch.manual_seed(0)
BATCH = (torch.randn(6, 4).double(), torch.randint(3, (6,)))
STEPS = 0
NOTES: list[float] = []


def keep(net: Any, values: Any) -> Any:
    return values


class Net(nn.Module):
    """Three layers, with ``between`` after the first."""

    def __init__(self, between: Any = keep, change: Any = None):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.between = between
        self.step, self.started, self.history, self.kept = (
            0,
            False,
            collections.deque[float](),
            None,
        )
        self.numbers = np.random.default_rng(0)
        if change:
            change(self)
        self.double()

    def forward(self, values: Any) -> Any:
        return self.last(torch.tanh(self.middle(self.between(self, self.first(values)))))


def compare(model: nn.Module, **options: Any) -> Any:
    return assert_pipeline_equals_plain(model, BATCH, loss=functional.cross_entropy, **options)


# right


def in_place(net: Any, h: Any) -> Any:
    h.mul_(2)
    h[:, 0] = 0
    h += torch.sin(torch.ones_like(h))
    return torch.tanh(h)


def reads_training(net: Any, h: Any) -> Any:
    return h * 2 if net.training else h


def kept_for_itself(net: Any, h: Any) -> Any:
    net.kept = torch.tanh(h)
    return h + net.kept


def gradient_within(net: Any, h: Any) -> Any:
    x = torch.sin(h)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return h + gradient


def complex_numbers(net: Any, h: Any) -> Any:
    return torch.fft.ifft(torch.fft.fft(torch.complex(h, torch.sin(h))) * 2).real


def asserts(net: Any, h: Any) -> Any:
    assert h.abs().sum() > 0
    return h


def checkpointed(reentrant: bool) -> Any:
    return lambda net, h: checkpoint(net.middle, torch.tanh(h), use_reentrant=reentrant)


def made_once(net: Any, h: Any) -> Any:
    if net.kept is None:
        net.kept = torch.linspace(1, 2, 8, dtype=h.dtype)
    return h * net.kept


def certain_chance(net: Any, h: Any) -> Any:
    # As models with layers dropped at a rate of zero do.
    started = time.perf_counter()
    if random.random() < 0.0 or np.random.random() >= 1.0 or random.uniform(1, 2) < 1:
        return h
    f"{time.perf_counter() - started:.1f} s"
    return torch.sin(h)


def seeded_chance(net: Any, h: Any) -> Any:
    np.random.seed(3)
    return h * float(np.random.rand())


def equal_in_shape_too(net: Any, h: Any) -> Any:
    """An ``equal`` that broadcasting would call true."""
    ones = torch.ones_like(h)
    return h if torch.equal(ones, ones[:, :1]) or torch.equal(ones[0], ones) else h * 2


def two_names(net: Any) -> None:
    net.again, net.alias = net.middle, net.first.weight


def under_two_names(net: Any, h: Any) -> Any:
    return net.again(h) + h @ net.alias @ net.alias.t()


def detached_by_data(net: Any, h: Any) -> Any:
    """Reads and writes through ``.data``, as autograd does not hear of."""
    net.middle.weight.data.clamp_(-0.2, 0.2)
    with_nan = h.data.clone()
    with_nan[:, 0] = float("nan")
    return h * (1 + h.data.abs().max(1, keepdim=True).values) + with_nan.nan_to_num().mul(0)


def cast_to_what_it_is(net: Any, h: Any) -> Any:
    net.middle = net.middle.to(torch.float64).to("cpu").double()
    return h


def clamped(net: Any) -> None:
    net.middle.weight.data.clamp_(-0.2, 0.2)


def whole_numbers(net: Any) -> None:
    net.numbers = nn.Parameter(torch.arange(8), requires_grad=False)


def complex_weight(net: Any) -> None:
    net.phases = nn.Parameter(torch.randn(8, dtype=torch.complex128))
    net.double = lambda: net  # which would make it real


RIGHT = {
    "in-place changes": (in_place, None),
    "reads self.training": (reads_training, None),
    "keeps a tensor for itself": (kept_for_itself, None),
    "makes a constant in its first call": (made_once, None),
    "a gradient within forward": (gradient_within, None),
    "complex activations": (complex_numbers, None),
    "an assertion on values": (asserts, None),
    "torch.utils.checkpoint": (checkpointed(False), None),
    "torch.utils.checkpoint, reentrant": (checkpointed(True), None),
    "chance and time that decide nothing": (certain_chance, None),
    "chance from a fixed seed": (seeded_chance, None),
    "a module and a tensor under two names": (under_two_names, two_names),
    "whole numbers as a parameter": (lambda net, h: h * net.numbers, whole_numbers),
    "reads and writes through .data": (detached_by_data, clamped),
    "module.to where it is already": (cast_to_what_it_is, None),
    "torch.equal of unequal shapes": (equal_in_shape_too, None),
    "weight_norm": (keep, lambda net: nn.utils.parametrizations.weight_norm(net.middle)),
    "orthogonal": (keep, lambda net: nn.utils.parametrizations.orthogonal(net.middle)),
}


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


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_the_old_weight_norm_is_right() -> None:
    compare(Net(keep, lambda net: nn.utils.weight_norm(net.middle)))


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


def test_the_users_batch_stays_as_it_was_where_forward_writes_to_it() -> None:
    class Writes(Net):
        def forward(self, values: Any) -> Any:
            values.mul_(2)
            values[:, 1] = 0
            return super().forward(values)

    batch = (BATCH[0].clone(), BATCH[1])
    plain = copy.deepcopy(Writes())
    model = Writes()
    model.load_state_dict(plain.state_dict())
    functional.cross_entropy(plain(BATCH[0].clone()), BATCH[1]).backward()
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    stage = graph.stage(range(len(graph.layer_names))).module
    stage(*batch)[0].backward()
    assert torch.equal(batch[0], BATCH[0])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


# right micro-batch by micro-batch, as samples are mixed


def updated_by_hand(net: Any, h: Any) -> Any:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        net.count += 1
    net.variance = 0.9 * net.variance + 0.1 * h.detach().var(0)
    return (h - net.mean) / net.variance + net.count


MIXING = {
    "buffers updated by hand": (updated_by_hand, None),
    "batch_norm without statistics": (
        lambda net, h: functional.batch_norm(h, None, None, training=True),
        None,
    ),
    "batch_norm with statistics": (
        lambda net, h: functional.batch_norm(h, net.mean, net.variance, training=True),
        None,
    ),
    "spectral_norm": (keep, lambda net: nn.utils.parametrizations.spectral_norm(net.middle)),
    "the old spectral_norm": (keep, lambda net: nn.utils.spectral_norm(net.middle)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
@pytest.mark.parametrize("name", MIXING)
def test_it_is_right_micro_batch_by_micro_batch(name: str) -> None:
    model = Net(*MIXING[name])
    compare(model, per_micro_batch=True)
    compare(Net(*MIXING[name]), micro_batches=1)


def follows(net: Any, h: Any) -> Any:
    """A momentum encoder in the usual form."""
    with torch.no_grad():
        for slow, fast in ((net.slow.weight, net.middle.weight), (net.slow.bias, net.middle.bias)):
            slow.data = slow.data * 0.9 + fast.data * 0.1
    return h + net.slow(h)


def with_a_slow_copy(net: Any) -> None:
    net.slow = copy.deepcopy(net.middle).requires_grad_(False)
    nn.init.zeros_(net.slow.weight)


def test_what_forward_assigns_to_data_is_as_in_the_plain_module() -> None:
    model = Net(follows, with_a_slow_copy)
    plain = copy.deepcopy(model)
    graph = capture_model(model, BATCH, loss=functional.cross_entropy)
    assert not model.get_parameter("slow.weight").any()
    stage: Any = graph.stage(range(len(graph.layer_names))).module
    for _ in range(2):
        expected = functional.cross_entropy(plain(BATCH[0]), BATCH[1])
        found = stage(*BATCH)[0]
    torch.testing.assert_close(found, expected)
    for name in ("slow.weight", "slow.bias"):
        torch.testing.assert_close(model.get_parameter(name), plain.get_parameter(name))


def test_another_type_of_data_is_refused_with_the_line() -> None:
    def halves(net: Any, h: Any) -> Any:
        net.middle.weight.data = net.middle.weight.data.float()
        return h

    with pytest.raises(CaptureFailed, match=r"\.data another type or shape at .*`net\.middle"):
        capture_model(Net(halves), BATCH, loss=functional.cross_entropy)


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
    holders = [s for s in stages if "count" in dict(s.module.named_buffers())]
    assert len(holders) == 1
    set_training(stage, False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stage(*BATCH)
    for name, buffer in before.items():
        assert torch.equal(model.get_buffer(name), buffer), name


# refused with the line


def counts(net: Any, h: Any) -> Any:
    net.step += 1
    return h / net.step


def counts_for_nothing(net: Any, h: Any) -> Any:
    net.step = net.step + 1
    return h


def begins(net: Any, h: Any) -> Any:
    if not net.started:
        net.started = True
        return h * 2
    return h


def remembers(net: Any, h: Any) -> Any:
    before = 0 if net.kept is None else net.kept
    net.kept = h.detach().mean(0)
    return h + before


def collects(net: Any, h: Any) -> Any:
    net.history.append(1.0)
    return h * len(net.history)


def counts_globally(net: Any, h: Any) -> Any:
    global STEPS
    STEPS += 1
    return h


def notes(net: Any, h: Any) -> Any:
    NOTES.append(0.5)
    return h * sum(NOTES)


def draws_from_its_own(net: Any, h: Any) -> Any:
    return h * float(net.numbers.random())


def drops_a_layer(net: Any, h: Any) -> Any:
    return h if random.random() < 0.5 else net.middle(h)


def permutes(net: Any, h: Any) -> Any:
    return h[:, torch.from_numpy(np.random.permutation(8))]


def under_a_name_of_its_own(net: Any, h: Any) -> Any:
    return torch.mul(h, chance())


def by_the_clock(net: Any, h: Any) -> Any:
    return h * (time.time() % 7)


def by_the_date(net: Any, h: Any) -> Any:
    return h * datetime.datetime.now().second


def by_the_moment(net: Any, h: Any) -> Any:
    return h * moment.now().second


STATE = {
    "Net.step": (counts, "net.step += 1"),
    "Net.step again": (counts_for_nothing, "net.step = net.step + 1"),
    "Net.started": (begins, "net.started = True"),
    "Net.kept": (remembers, "net.kept = h.detach().mean(0)"),
    "Net.history": (collects, ""),
    "Net.numbers": (draws_from_its_own, ""),
    f"{__name__}.STEPS": (counts_globally, ""),
    f"{__name__}.NOTES": (notes, ""),
}


@pytest.mark.parametrize("name", STATE)
def test_state_of_python_that_changes_is_refused_and_put_back(name: str) -> None:
    between, line = STATE[name]
    model = Net(between)
    with pytest.raises(CaptureFailed) as caught:
        capture_model(model, BATCH, loss=functional.cross_entropy)
    message = str(caught.value)
    assert message.startswith(f"{name.split()[0]} cannot be captured: forward ")
    assert line in message
    assert f"{__file__}:" in message or not line
    assert "register_buffer" in message
    assert (model.step, model.started, model.kept, len(model.history)) == (0, False, None, 0)
    assert (STEPS, NOTES) == (0, [])


def test_state_that_is_first_met_deep_down_is_refused_and_put_back_too() -> None:
    model = Net(collects)
    held = model.history
    del model.history
    model.above, model.history = [[[held]]], held
    with pytest.raises(CaptureFailed, match=r"^Net\.history cannot be captured: forward "):
        capture_model(model, BATCH, loss=functional.cross_entropy)
    assert not held


CHANCE = {
    "random.random()": drops_a_layer,
    "random.random() ": under_a_name_of_its_own,
    "numpy.random.permutation()": permutes,
    "time.time()": by_the_clock,
    "datetime.now()": by_the_date,
    "datetime.now() ": by_the_moment,
}


@pytest.mark.parametrize("name", CHANCE)
def test_chance_and_time_outside_of_torch_are_refused_with_the_line(name: str) -> None:
    before = random.getstate()
    with pytest.raises(CaptureFailed) as caught:
        capture_model(Net(CHANCE[name]), BATCH, loss=functional.cross_entropy)
    message = str(caught.value)
    assert message.startswith(f"{name.strip()} gives forward another number in every call")
    assert f"{__file__}:{CHANCE[name].__code__.co_firstlineno + 1} `" in message
    assert random.getstate() == before
    assert type(random.random()) is float
    assert type(time.time()) is float
    assert datetime.datetime is moment


def test_a_seed_from_the_clock_is_none() -> None:
    def drops_a_layer(net: Any, h: Any) -> Any:
        random.seed(3)
        random.seed()
        return h if random.random() < 0.5 else net.middle(h)

    with pytest.raises(CaptureFailed, match=r"^random\.random\(\) gives forward another number"):
        capture_model(Net(drops_a_layer), BATCH, loss=functional.cross_entropy)


def test_dates_are_dates_while_a_model_is_captured() -> None:
    found, made = list[object](), moment(2026, 11, 25)

    def asks(net: Any, h: Any) -> Any:
        found.append(isinstance(made, datetime.datetime))
        found.append(isinstance(3, datetime.datetime))
        return h

    capture_model(Net(asks), BATCH, loss=functional.cross_entropy)
    assert found[:2] == [True, False]


def test_what_forward_printed_is_kept_where_the_model_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prints(net: Any, h: Any) -> Any:
        print("on the way", file=sys.stderr)
        return h * datetime.datetime.now().second

    with pytest.raises(CaptureFailed):
        capture_model(Net(prints), BATCH, loss=functional.cross_entropy)
    assert capsys.readouterr().err == "on the way\n"


def test_a_gradient_within_forward_that_cannot_be_traced_is_refused_with_the_line() -> None:
    def penalty(net: Any, h: Any) -> Any:
        inner = torch.tanh(net.middle(h)).sum()
        (gradient,) = torch.autograd.grad(inner, h, create_graph=True)
        return h + gradient

    with pytest.raises(CaptureFailed) as caught:
        capture_model(Net(penalty), BATCH, loss=functional.cross_entropy)
    assert "`(gradient,) = torch.autograd.grad(inner, h, create_graph=True)`" in str(caught.value)


def test_what_the_model_held_before_is_there_after_capture() -> None:
    model = Net(kept_for_itself)
    mark: Any = torch.ones(8)
    model.kept = mark
    capture_model(model, BATCH, loss=functional.cross_entropy)
    assert model.kept is mark


def assigned_on_first_sight(net: Any, h: Any) -> Any:
    """Branches on a buffer that it assigns: for the second micro-batch otherwise."""
    if net.count == 0:
        net.mean = net.mean + h.detach().mean(0)
    net.count = net.count + 1
    return h


def test_buffers_that_are_assigned_are_put_back_where_the_model_is_refused() -> None:
    model = Net(assigned_on_first_sight)
    with pytest.raises(CaptureFailed, match=r"if net\.count == 0:"):
        capture_model(model, BATCH, loss=functional.cross_entropy)
    assert model.count == 0
    assert torch.equal(model.get_buffer("mean"), torch.zeros(8).double())
