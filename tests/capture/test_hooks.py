"""Hooks on tensors and modules: gradients of the plain module, or refused in a line."""

from typing import Any

import pytest
import torch
from capture import three_layers
from capture.three_layers import BATCH, compare, keep
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
)

from penstock.capture.capture import capture_model
from penstock.errors import BadInput, CaptureFailed


class Net(three_layers.Net):
    """Three layers with modules inside of the second."""

    def __init__(self, between: Any = keep):
        super().__init__(between, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        self.hooking, self.alpha = HooksItsInput(), 0.3

    def tenth(self, gradient: Any) -> Any:
        return gradient * self.alpha / 3


def on_a_view(net: Any, h: Any) -> Any:
    """A view is made anew wherever it is read; its gradient is the sum of them all."""
    view = h.view(-1, 2, 4)
    view.register_hook(lambda g: g * torch.linspace(0, 1, 4, dtype=g.dtype))
    flat = view.flatten(1)
    return flat + net.middle(flat) * torch.sin(flat)


def with_a_distant_reader(net: Any, h: Any) -> Any:
    h.register_hook(lambda g: g.flip(1))
    return net.middle(net.middle(h) + 1) * h


def twice(net: Any, h: Any) -> Any:
    h.register_hook(lambda g: g + 0.5 * g.flip(1))
    h = torch.tanh(h)
    h.register_hook(net.tenth)
    h.register_hook(lambda g: g * net.alpha)
    return h


def in_autocast(net: Any, h: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        wide = torch.sin(h)
        wide.register_hook(lambda g: g * 3)
    return wide * h


def where_gradients_are(net: Any, h: Any) -> Any:
    with torch.no_grad():
        still = h * 2
    if still.requires_grad:
        still.register_hook(lambda g: g * 3)
    return still + h


def on_an_outer_tensor(net: Any, h: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        h.register_hook(lambda g: g * 0.1)
        wide = torch.sin(h)
    return wide


class HooksItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: Any) -> Any:
        h.register_hook(lambda g: g + g.flip(1))
        return self.linear(h)


def late(net: Any, h: Any) -> Any:
    """The hook is registered when all that its stage sends has been made."""
    wide = torch.tanh(net.middle(h))
    found = torch.sin(wide)
    wide.register_hook(lambda g: g.flip(1))
    return found


def masked(net: Any, h: Any) -> Any:
    mask = torch.sigmoid(h).detach()
    h.register_hook(lambda g: g * mask)
    return h


def done(act: Any) -> Any:
    """Do something with what is between the layers, and pass it on."""
    return lambda net, h: (act(net, h), h)[1]


KEPT = {
    "that scales": done(lambda net, h: h.register_hook(lambda g: g * 0.1)),
    "on a view": on_a_view,
    "on what a later stage reads too": with_a_distant_reader,
    "one after another": twice,
    "in a region of lower precision": in_autocast,
    "only where there are gradients": where_gradients_are,
    "whose function holds a tensor of forward": masked,
    "that is removed at once": done(lambda net, h: h.register_hook(lambda g: g * 0.1).remove()),
    "retained gradients": done(lambda net, h: h.retain_grad()),
    "on what enters a region": on_an_outer_tensor,
    "on a parameter, after accumulation": done(
        lambda net, h: net.last.weight.register_post_accumulate_grad_hook(lambda p: None)
    ),
    "within a module, on what enters it": lambda net, h: net.hooking(h) * torch.sin(h),
    "after what a later stage reads": late,
}


@pytest.mark.parametrize("name", KEPT)
def test_a_hook_on_a_tensor_changes_gradients_as_in_the_plain_module(name: str) -> None:
    compare(Net(KEPT[name]))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_it_does_in_other_schedules_and_where_activations_are_recomputed(schedule: str) -> None:
    compare(Net(on_a_view), schedule=schedule, recompute=schedule == "gpipe")


def test_a_hook_is_called_once_for_each_micro_batch() -> None:
    seen: list[tuple[int, ...]] = []

    def between(net: Any, h: Any) -> Any:
        h.register_hook(lambda g: seen.append(tuple(g.shape)))
        return h

    compare(Net(between), recompute=True)
    assert seen == [(6, 8), (3, 8), (3, 8)]


def backward_hook(module: Any, given: Any, made: Any) -> Any:
    return tuple(None if g is None else g * 0.1 for g in given)


def backward_pre_hook(module: Any, made: Any) -> Any:
    return tuple(None if g is None else g * 3 for g in made)


class Pair(nn.Module):
    """Several arguments, not all of them tensors, and several results."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: Any, factor: float, nothing: Any = None) -> Any:
        return self.linear(h) * factor, h.shape[1], torch.tanh(h)


class WithPair(Net):
    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, values: Any) -> Any:
        one, width, other = self.pair(self.first(values), 2.0)
        return self.last(self.middle(one) / width + other)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("path", ["first", "middle", "middle.0", "last", "pair"])
def test_backward_hooks_of_modules_change_gradients_as_in_the_plain_module(path: str) -> None:
    model = WithPair().double()
    module = model.get_submodule(path)
    module.register_full_backward_pre_hook(backward_pre_hook)
    if path != "first":  # its input has no gradient, so a hook may return none
        module.register_full_backward_hook(backward_hook)
    compare(model)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_see_what_they_see_in_the_plain_module() -> None:
    seen: list[Any] = []

    def note(module: Any, given: Any, made: Any) -> None:
        shapes = [None if g is None else tuple(g.shape) for g in (*given, *made)]
        seen.append((type(module), shapes))

    model = Net().double()
    model.first.register_full_backward_hook(note)
    model.middle.register_full_backward_hook(note)
    compare(model, micro_batches=3)
    whole, rest = seen[:2], seen[2:]
    assert whole == [(nn.Sequential, [(6, 8), (6, 8)]), (nn.Linear, [None, (6, 8)])]
    assert rest.count((nn.Sequential, [(2, 8), (2, 8)])) == 3
    assert rest.count((nn.Linear, [None, (2, 8)])) == 3


def test_a_module_with_a_backward_hook_is_not_cut() -> None:
    model = Net().double()
    names = capture_model(model, BATCH, loss=functional.cross_entropy).layer_names
    assert names == ("first", "middle.0", "middle.2", "last", "loss")
    model.middle.register_full_backward_hook(backward_hook)
    names = capture_model(model, BATCH, loss=functional.cross_entropy).layer_names
    assert names == ("first", "middle.0", "last", "loss")


def doubled(module: Any, given: Any, made: Any) -> Any:
    return made * 2


def test_forward_hooks_change_what_modules_get_and_return() -> None:
    model = Net().double()
    model.middle.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    model.middle[0].register_forward_hook(doubled)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True
    )
    model.last.register_forward_hook(doubled, always_call=True)
    model.last.register_forward_hook(lambda module, given, made: None)
    compare(model)


def test_hooks_on_parameters_change_their_gradients() -> None:
    model = Net()
    model.double().first.weight.register_hook(lambda g: g * 0.1)
    compare(model)


def on_several(net: Any, h: Any) -> Any:
    torch.autograd.graph.register_multi_grad_hook([h], lambda g: None)
    return h


def backward_within(net: Any, h: Any) -> Any:
    h.sum().backward(retain_graph=True)
    return h


REFUSED = {
    "register_multi_grad_hook": on_several,
    "backward(retain_graph=True)": backward_within,
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_see_gradients_of_its_stage_only_is_refused_with_the_line(line: str) -> None:
    with pytest.raises(CaptureFailed) as caught:
        capture_model(Net(REFUSED[line]).double(), BATCH, loss=functional.cross_entropy)
    message = str(caught.value)
    assert f"{__file__}:" in message
    assert line in message.split("`")[1]
    assert "\n" not in message


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_old_backward_hooks_change_gradients_as_in_the_plain_module() -> None:
    model = Net().double()
    model.middle[2].register_backward_hook(backward_hook)
    compare(model)


def test_forward_hooks_for_all_modules_run_as_in_the_plain_module() -> None:
    with register_module_forward_hook(doubled):
        compare(Net())


def test_backward_hooks_for_all_modules_are_refused() -> None:
    model = Net().double()
    graph = capture_model(model, BATCH, loss=functional.cross_entropy)
    stage = graph.stage(range(len(graph.layer_names))).module
    with register_module_full_backward_hook(backward_hook):
        with pytest.raises(CaptureFailed, match="hooks for all modules"):
            capture_model(model, BATCH, loss=functional.cross_entropy)
        with pytest.raises(BadInput, match="hooks for all modules"):
            stage(*BATCH)
