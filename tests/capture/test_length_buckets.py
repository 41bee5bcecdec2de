"""Batches that are filled up to the length of their bucket."""

from typing import Any

import pytest
import torch
from bucket_models import IN_BUCKETS, WIDTH, Recurrent, batch_of, loss_of, tagger
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.lengths import Dynamic, Length
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.settings import Safety


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def captured(model: nn.Module, dynamic: Dynamic = IN_BUCKETS) -> Any:
    return capture_model(model, batch_of(5), loss=loss_of, granularity="block", dynamic=dynamic)


def in_two(graph: Any) -> Plan:
    layers = len(graph.layer_names)
    return Plan((Stage(range(2), (0,), (2,)), Stage(range(2, layers), (1,), (2,))), 3, 2, "1f1b")


def test_padded_batches_train_the_weights_as_the_batches_do() -> None:
    own, model = tagger(), tagger()
    graph = captured(model)
    assert graph.layer_names == ("embed", "blocks.0", "blocks.1", "blocks.2", "head", "loss")
    assert graph.largest_lengths == (6,)
    assert graph.batch_leaves(batch_of(5))[0].shape == (6, 6)
    pipe = Pipeline(
        graph, in_two(graph), batch_of(5), optimizer=sgd, safety=Safety(transport="in-process")
    )
    plain = sgd(own.parameters())
    for step, length in enumerate((5, 6, 2, 4, 3)):
        batch = batch_of(length, seed=step)
        plain.zero_grad()
        expected = loss_of(own(batch["tokens"]), batch)
        expected.backward()
        plain.step()
        assert abs(pipe.step(batch).loss - expected.item()) < 1e-12
    for name, parameter in own.named_parameters():
        assert torch.allclose(parameter, model.get_parameter(name), rtol=0, atol=1e-12), name


def test_chains_run_in_buckets_too() -> None:
    torch.manual_seed(3)
    chain = Chain([nn.Embedding(13, WIDTH), Recurrent(), nn.Linear(WIDTH, 13)]).double()

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    dynamic: Dynamic = {
        0: {1: Length("length", buckets=(4, 6), pad=0)},
        1: {1: Length("length", pad=-100)},
    }
    graph = capture_model(chain, tuple(batch_of(4).values()), loss=loss, dynamic=dynamic)
    batch = tuple(batch_of(4).values())
    pipe = Pipeline(
        graph, in_two(graph), batch, optimizer=sgd, safety=Safety(transport="in-process")
    )
    for length in (4, 5, 3):
        tokens, labels = batch_of(length).values()
        expected = loss(chain(tokens), labels).item()
        assert abs(pipe.step((tokens, labels)).loss - expected) < 1e-12


def test_buckets_without_pad_values_are_ignored_and_what_does_not_fit_is_refused() -> None:
    unpadded: Dynamic = {"tokens": {1: Length("length", buckets=(3, 6))}, "labels": {1: "length"}}
    graph = captured(tagger(1), unpadded)
    assert graph.batch_leaves(batch_of(5))[0].shape == (6, 5)
    assert graph.batch_leaves(batch_of(9))[0].shape == (6, 9)
    with pytest.raises(BadInput, match="length 10, but the largest bucket is 6; trim"):
        captured(tagger(1)).batch_leaves(batch_of(10))
    half: Dynamic = {"tokens": IN_BUCKETS["tokens"], "labels": {1: "length"}}
    with pytest.raises(BadInput, match=r"dimension 1 of batch\['labels'\] is 5, and the other"):
        captured(tagger(1), half).batch_leaves(batch_of(5))
    with pytest.raises(BadInput, match=r"from 1 to 8, with the buckets \[4, 9\]"):
        Length("length", max=8, buckets=(4, 9))
