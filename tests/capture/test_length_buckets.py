"""Models that are captured once for each bucket of lengths: one graph, one set of weights."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from bucket_models import (
    BUCKETS,
    IN_BUCKETS,
    WIDTH,
    Recurrent,
    batch_of,
    loss_of,
    plan_in_three,
    tagger,
)
from torch import nn
from torch.nn import functional

from penstock.capture.bucket_graph import BucketGraph
from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.lengths import Dynamic, Length
from penstock.capture.trace import capture_model
from penstock.errors import BadInput, CaptureFailed
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.without_flush.in_process import InProcessPipeline


def captured(model: nn.Module, dynamic: Dynamic = IN_BUCKETS) -> LayerGraph:
    return capture_model(model, batch_of(5), loss=loss_of, granularity="block", dynamic=dynamic)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def captured_once() -> LayerGraph:
    return captured(tagger())


@pytest.fixture
def graph(captured_once: LayerGraph) -> LayerGraph:
    """The tagger in buckets, with its first weights."""
    captured_once.model.load_state_dict(tagger().state_dict())
    return captured_once


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_bucket_trains_the_same_weights(graph: LayerGraph, schedule: str) -> None:
    """The pipeline on batches in buckets against the user's own module on them as they are."""
    own, plan = tagger(), plan_in_three(schedule=schedule)
    pipe = InProcessPipeline(graph, plan, batch_of(5), optimizer=sgd)
    plain = sgd(own.parameters())
    for step, length in enumerate((5, 6, 2, 4, 3)):
        batch = batch_of(length, seed=step)
        plain.zero_grad()
        expected = loss_of(own(batch["tokens"]), batch)
        expected.backward()
        plain.step()
        assert abs(pipe.step(batch).loss - expected.item()) < 1e-12
        assert abs(pipe.evaluate(batch) - loss_of(own(batch["tokens"]), batch).item()) < 1e-12
    named = dict(own.named_parameters())
    for name, parameter in graph.model.named_parameters():
        assert torch.allclose(parameter, named[name], rtol=0, atol=1e-12), name


def test_layers_and_costs_are_those_of_one_length_and_sizes_follow_the_bucket(
    graph: LayerGraph,
) -> None:
    assert isinstance(graph, BucketGraph)
    alone = capture_model(tagger(), batch_of(6), loss=loss_of, granularity="block")
    assert graph.layer_names == alone.layer_names
    assert graph.parameter_uses == alone.parameter_uses
    spec = graph.crossings[0][0]
    assert [spec.at((bucket,)).shape for bucket in BUCKETS] == [(6, n, WIDTH) for n in BUCKETS]
    assert graph.largest_lengths == (6,)
    names = [name for name, _ in graph.stage(range(6)).module.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in graph.model.named_parameters())
    expected = estimate_profile(alone, batch_of(6), "H100-80GB", batch_sizes=(2,))
    large, small = (
        estimate_profile(graph, batch_of(length), "H100-80GB", batch_sizes=(2,))
        for length in (5, 3)
    )
    assert large.layers == expected.layers != small.layers
    assert [edge.bytes for edge in large.edges] == [edge.bytes for edge in expected.edges]
    assert [e.bytes.at(2) for e in small.edges[:3]] == [e.bytes.at(2) / 2 for e in large.edges[:3]]
    assert len(measure_profile(graph, batch_of(3), batch_sizes=(2,), repeats=1).layers) == 6


def test_a_model_that_takes_every_length_needs_no_buckets() -> None:
    model = nn.Sequential(nn.Embedding(13, 4), nn.Linear(4, 13))

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    batch = tuple(batch_of(5).values())
    dynamic: Dynamic = {0: {1: Length("length", buckets=(4, 6))}, 1: {1: "length"}}
    graph = capture_model(model, batch, loss=loss, dynamic=dynamic)
    assert not isinstance(graph, BucketGraph)
    assert graph.lengths_of({0: batch[0]}) == (5,)


class OwnCell(nn.Module):
    """Word by word, with statistics that every word updates."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(words[:, 0]), []
        for word in words.unbind(1):
            state = self.cell(word, state)
            states.append(self.norm(state))
        return torch.stack(states, 1)


class Lstm(nn.LSTM):
    def forward(self, words: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(words)[0]


@pytest.mark.parametrize("build", [OwnCell, lambda: Lstm(WIDTH, WIDTH, batch_first=True)])
def test_recurrent_modules_keep_weights_and_statistics_in_common(build: Any) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(13, WIDTH), build(), nn.Linear(WIDTH, 13)).double()
    own = copy.deepcopy(model)

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    batches = [tuple(batch_of(length).values()) for length in (4, 3, 4)]
    dynamic: Dynamic = {0: {1: Length("length", buckets=(3, 4))}, 1: {1: "length"}}
    graph = capture_model(model, batches[0], loss=loss, granularity="block", dynamic=dynamic)
    assert isinstance(graph, BucketGraph)
    count = len(graph.layer_names)
    stages = Stage(range(1), (0,), (6,)), Stage(range(1, count), (1,), (6,))
    pipe = InProcessPipeline(graph, Plan(stages, 1, 6, "gpipe"), batches[0], optimizer=sgd)
    plain = sgd(own.parameters())
    for tokens, labels in batches:
        plain.zero_grad()
        expected = loss(own(tokens), labels)
        expected.backward()
        plain.step()
        assert abs(pipe.step((tokens, labels)).loss - expected.item()) < 1e-12
    for name, tensor in own.state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, rtol=0, atol=1e-12), name


def test_chains_run_in_buckets_too() -> None:
    torch.manual_seed(3)
    modules = [nn.Embedding(13, WIDTH), Recurrent(), nn.Linear(WIDTH, 13)]
    chain = Chain(modules).double()

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    dynamic: Dynamic = {
        0: {1: Length("length", buckets=(4, 6), pad=0)},
        1: {1: Length("length", pad=-100)},
    }
    graph = capture_model(chain, tuple(batch_of(4).values()), loss=loss, dynamic=dynamic)
    plan = plan_in_three()
    stages = [replace(s, layers=range(n, n + 1 + (n == 2))) for n, s in enumerate(plan.stages)]
    pipe = InProcessPipeline(
        graph, replace(plan, stages=tuple(stages)), tuple(batch_of(4).values()), optimizer=sgd
    )
    for length in (4, 5, 3):
        tokens, labels = batch_of(length).values()
        expected = loss(chain(tokens), labels).item()
        assert abs(pipe.step((tokens, labels)).loss - expected) < 1e-12


def test_batches_that_no_bucket_holds_are_refused_before_training(
    graph: LayerGraph,
) -> None:
    model = graph.model
    pipe = InProcessPipeline(graph, plan_in_three(), batch_of(5), optimizer=sgd)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(BadInput, match="length 10, but the largest bucket is 6; trim"):
        pipe.step(batch_of(10))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    unpadded: Dynamic = {"tokens": IN_BUCKETS["tokens"], "labels": {1: "length"}}
    graph = captured(tagger(1), unpadded)
    assert graph.batch_leaves(batch_of(6))[0].shape == (6, 6)
    with pytest.raises(BadInput, match=r"dimension 1 of batch\['labels'\] is 5, but Tagger runs"):
        graph.batch_leaves(batch_of(5))


def test_what_cannot_be_captured_in_buckets_is_refused() -> None:
    with pytest.raises(CaptureFailed, match=r"other layers at length 3 than at length 6 .*block"):
        capture_model(tagger(1), batch_of(5), loss=loss_of, dynamic=IN_BUCKETS)
    with pytest.raises(CaptureFailed, match=r"buckets=\(16, 32, 64\)"):
        captured(tagger(1), {"tokens": {1: "length"}, "labels": {1: "length"}})
    many = Length("length", buckets=tuple(range(2, 30)))
    with pytest.raises(BadInput, match="captured for 28 buckets of 'length', and 16 are the most"):
        captured(tagger(1), {"tokens": {1: many}, "labels": {1: "length"}})
    with pytest.raises(BadInput, match=r"from 1 to 8, with the buckets \[4, 9\]"):
        Length("length", max=8, buckets=(4, 9))


def test_compiled_stages_are_refused(graph: LayerGraph) -> None:
    with pytest.raises(BadInput, match=r"captured once for each bucket of lengths.*leave compile"):
        Pipeline(
            graph,
            replace(plan_in_three(), stages=(replace(plan_in_three().stages[0], layers=range(6)),)),
            batch_of(5),
            compile=True,
        )
