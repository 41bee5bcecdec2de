"""Modules whose code goes by values are kept whole; the rest of the model is cut as ever."""

from typing import Any

import pytest
import torch
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.capture.trace import capture_model
from penstock.errors import CaptureFailed, RunFailed
from penstock.plan.plan import Plan, Stage
from penstock.runtime.without_flush.in_process import InProcessPipeline

WIDTH, EXPERTS, ROWS = 6, 3, 4


class Experts(nn.Module):
    """Runs the experts that were chosen, one after another, each on the words that chose it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, values):
        flat = values.reshape(-1, WIDTH)
        shares, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for expert in chosen.unique():
            (rows,) = torch.where(chosen == expert)
            result.index_add_(0, rows, torch.tanh(flat[rows] @ self.up[expert]))
        return (result * shares.unsqueeze(-1)).view(values.shape)


class Remembers(Experts):
    """Assigns a buffer, which a call that is kept whole would lose."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, values):
        self.seen = self.seen + values.detach().abs().max()
        return super().forward(values)


class Layers(nn.Module):
    def __init__(self, kind: Any = Experts):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([kind(), kind()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, values):
        hidden = self.first(values)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden).flatten(1)


class OneLarge(Layers):
    """One module that holds most of the model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Experts()])
        self.layers[0].up = nn.Parameter(torch.randn(20 * EXPERTS, WIDTH, WIDTH))


class FewerWords(nn.Module):
    """A loop over values, and a result whose length they decide."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values):
        for number in (values.detach().flatten() > 500).unique():
            values = values[:, :2] if number else values * self.weight
        return values


class Branching(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([FewerWords()])

    def forward(self, values):
        return self.head(self.layers[0](values) + 0 * self.first(values).sum())


BATCH = (torch.randn(ROWS, 5, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 3]))


def _kept(graph: Any) -> int:
    return sum("run_opaque" in str(node.target) for node in graph.flow.clean.graph.nodes)


def test_experts_in_plain_python_are_right_and_layers_of_their_own():
    graph = assert_pipeline_equals_plain(Layers().double(), BATCH, loss=nn.functional.cross_entropy)
    assert _kept(graph) == 2
    assert graph.layer_names == ("first", "layers.0", "layers.1", "head", "loss")


def test_stages_run_for_any_number_of_samples(pipeline):
    model = Layers().double()
    graph = capture_model(model, BATCH, loss=nn.functional.cross_entropy)
    for rows in (1, 7):
        batch = (torch.randn(rows, 5, WIDTH, dtype=torch.float64), torch.arange(rows) % 10)
        pipeline.assert_composition_equals_model(
            graph, model, batch, [1, 2, 3], loss=nn.functional.cross_entropy, rows=rows
        )


class WithPictures(nn.Module):
    """Crops every picture to its size, in a method that gives a list of them."""

    def __init__(self):
        super().__init__()
        self.vision = nn.Linear(WIDTH, WIDTH)
        self.words = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 10)

    def crop(self, picture, size):
        return self.vision(picture)[: size.item()]

    def features(self, pictures, sizes):
        return [self.crop(one, size) for one, size in zip(pictures, sizes, strict=True)]

    def forward(self, pictures, sizes, words):
        features = torch.cat(self.features(pictures, sizes), dim=0)
        hidden = words + features.view(words.shape[0], -1, WIDTH).mean(1)
        for layer in self.words:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


class Checkpointed(WithPictures):
    """Runs its module again in backward, when the parameters given to the call are gone."""

    def crop(self, picture, size):
        return checkpoint(self.vision, picture, use_reentrant=False)[: size.item()]


def _pictures(rows, size=3):
    pictures = torch.randn(rows, 5, WIDTH, dtype=torch.float64)
    words = torch.randn(rows, WIDTH, dtype=torch.float64)
    return pictures, torch.full((rows,), size), words, torch.arange(rows) % 10


def test_a_method_that_lists_the_samples_is_kept_and_its_list_is_joined(pipeline):
    model, batch = WithPictures().double(), _pictures(ROWS)
    graph = assert_pipeline_equals_plain(model, batch, loss=nn.functional.cross_entropy)
    assert _kept(graph) == 1
    pipeline.assert_composition_equals_model(
        graph, model, _pictures(7), [1, 3], loss=nn.functional.cross_entropy, rows=7
    )
    assert set(dict(graph.stage(range(0, 1)).module.named_parameters())) == {
        "vision.weight",
        "vision.bias",
    }
    stage = graph.stage(range(len(graph.layer_names))).module
    with pytest.raises(RunFailed, match=r"WithPictures.features returned \[\(2, 6\), "):
        stage(*_pictures(ROWS, size=2))


def test_what_runs_again_in_backward_is_not_kept():
    with pytest.raises(CaptureFailed, match=r"size\.item\(\)"):
        capture_model(Checkpointed().double(), _pictures(ROWS), loss=nn.functional.cross_entropy)


def test_values_that_change_a_shape_stop_the_stage():
    model = Branching().double()
    graph = capture_model(model, BATCH, loss=_total)
    assert _kept(graph) == 1
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (ROWS,)),), 1, ROWS, "1f1b")
    player = InProcessPipeline(graph, plan, BATCH, optimizer=_sgd)
    player.step(BATCH)
    with pytest.raises(RunFailed, match=r"FewerWords.forward returned \[\(4, 2, 6\)\]"):
        player.step((BATCH[0] * 0 + 1e3, BATCH[1]))


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def _total(output, target):
    return (output.sum(1) - target.unsqueeze(1)).square().mean()


@pytest.mark.parametrize(
    ("model", "words"),
    [(OneLarge(), "for expert in chosen"), (Layers(Remembers), "for expert in chosen")],
)
def test_most_of_a_model_and_what_assigns_buffers_are_refused_with_the_line(model, words):
    with pytest.raises(CaptureFailed, match=words) as caught:
        capture_model(model.double(), BATCH, loss=nn.functional.cross_entropy)
    assert "\n" not in str(caught.value)


def test_on_meta_the_line_is_named():
    with torch.device("meta"):
        model = Layers()
        batch = (torch.randn(ROWS, 5, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    with pytest.raises(CaptureFailed, match="for expert in chosen"):
        capture_model(model, batch, loss=nn.functional.cross_entropy)
