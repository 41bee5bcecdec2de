"""Calls that are kept whole: one operator while tracing, the original in its stage."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.evaluation import set_training
from penstock.capture.opaque import active_table, call_opaquely
from penstock.capture.trace import capture_model
from penstock.errors import CaptureFailed

BATCH = (torch.randn(6, 4).double(), torch.randint(3, (6,)))


def opaquely(function, *args, modules=(), **kwargs):
    """``function``, kept whole while a model is captured."""
    table = active_table()
    if table is None:
        return function(*args, **kwargs)
    return call_opaquely(table, function, args, kwargs, name="the call", modules=modules)


class Net(nn.Module):
    """Three layers, with ``between`` after the first."""

    def __init__(self, between):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.full((8,), 0.7))
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.between = between

    def forward(self, values):
        return self.last(torch.tanh(self.middle(self.between(self, self.first(values)))))


def captured(between, **options):
    model = Net(between).double()
    return model, capture_model(model, BATCH, loss=functional.cross_entropy, **options)


def two_results(net, h):
    def function(pair, *, rows, factor):
        x, scale = pair["x"], pair["scale"]
        return {"scaled": x * scale * factor, "rows": (x.new_ones(rows, 1), None, "kept")}

    found = opaquely(function, {"x": h, "scale": net.scale}, rows=h.shape[0], factor=3.0)
    assert found["rows"][1:] == (None, "kept")
    return found["scaled"] + found["rows"][0]


def in_regions(net, h):
    with torch.no_grad():
        still = opaquely(torch.mul, h, net.scale)
    with torch.autocast("cpu", torch.bfloat16):
        low = opaquely(
            lambda x, w: functional.linear(x, w).float(), h.float(), net.middle.weight.float()
        )
    return h * still + low.double()


def on_the_stages_device(net, h):
    return opaquely(lambda x, device: x + torch.ones(8, device=device), h, h.device)


def with_the_parameters_of_a_module(net, h):
    def function(tensors, x):
        return torch.func.functional_call(net.middle, tensors, (x,))

    return opaquely(function, dict(net.middle.named_parameters()), h)


KEPT = {
    "a function": lambda net, h: opaquely(torch.tanh, h),
    "two results, a size, a parameter": two_results,
    "in regions without gradients and in low precision": in_regions,
    "on the device of the stage": on_the_stages_device,
    "a module": with_the_parameters_of_a_module,
    "a result without a gradient": lambda net, h: opaquely(lambda x: (x * 2, x.detach()), h)[1] * h,
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_call_that_is_kept_whole_gives_the_loss_and_gradients_of_the_model(pipeline, name, rows):
    model, graph = captured(KEPT[name])
    cuts = range(1, len(graph.layer_names))
    pipeline.assert_composition_equals_model(
        graph, model, BATCH, cuts, loss=functional.cross_entropy, rows=rows
    )


def test_a_call_is_one_operator_and_cuts_are_made_on_both_sides_of_it():
    _, graph = captured(lambda net, h: opaquely(lambda x, w: x @ w, h, net.middle.weight))
    assert graph.layer_names == ("first", "forward", "middle", "last", "loss")
    stage: Any = graph.stage(range(1, 2)).module
    assert "matmul" not in [node.name for node in stage.graph.nodes]
    assert {use.name: use.layers for use in graph.parameter_uses}["middle.weight"] == (1, 2)


def test_a_call_that_draws_numbers_is_never_run_twice():
    _, graph = captured(lambda net, h: h + opaquely(torch.rand_like, h.new_ones(8)))
    stages: list[Any] = [graph.stage(range(k, k + 1)).module for k in range(4)]
    assert sum(stage.code.count("run_opaque") for stage in stages) == 1


def test_a_module_in_a_call_is_evaluated_with_its_stage():
    def between(net, h):
        drop = nn.Dropout(0.5)
        return opaquely(drop, h, modules=(drop,))

    _, graph = captured(between)
    stage = graph.stage(range(4)).module
    first = stage(*BATCH)[0]
    assert not torch.equal(first, stage(*BATCH)[0])
    set_training(stage, False)
    assert torch.equal(stage(*BATCH)[0], stage(*BATCH)[0])
    set_training(stage, True)
    assert not torch.equal(stage(*BATCH)[0], stage(*BATCH)[0])


def test_stages_with_calls_can_be_copied():
    model, graph = captured(KEPT["a function"])
    stage = copy.deepcopy(graph.stage(range(4)).module)
    torch.testing.assert_close(
        stage(*BATCH)[0], functional.cross_entropy(model(BATCH[0]), BATCH[1])
    )


REFUSED = {
    "reads a tensor of the model that is not among its arguments": lambda net, h: opaquely(
        lambda x: x * net.scale, h
    ),
    "writes to one of its arguments": lambda net, h: opaquely(lambda x: x.add_(1), h * 1),
    "does not run on tensors without values": lambda net, h: opaquely(
        lambda x: x * x.detach().numpy().max(), h
    ),
    "depends on the number of samples": lambda net, h: opaquely(lambda x: (x, x.shape[0]), h)[0],
    "is computed from the number of samples": lambda net, h: opaquely(
        torch.mul, h, h.shape[0] * 0.5
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_kept_is_refused_with_the_line(why):
    with pytest.raises(CaptureFailed) as caught:
        captured(REFUSED[why])
    message = str(caught.value)
    assert why in message
    assert f"{__file__}:" in message
    assert "penstock.Chain" in message


def test_a_call_must_return_the_same_structure_in_every_call():
    answers = [1.0]
    _, graph = captured(lambda net, h: opaquely(lambda x: (x, *answers), h)[0])
    answers.clear()
    with pytest.raises(CaptureFailed, match="returned something else"):
        graph.stage(range(4)).module(*BATCH)
