"""Losses of several terms: the loss and every gradient are those of the user's own module."""

from functools import partial
from typing import Any

import pytest
import torch
from plain_training import plain_step
from runtime.loss_cases import (
    ROWS,
    SUMS,
    Heads,
    Plain,
    case_of,
    close,
    heads_batch,
    trained_by_ranks,
)
from runtime.pipeline_cases import plan_of
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from penstock.capture.batch.lengths import Length
from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers

NAMES = [
    *SUMS,
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "Qwen3Moe with router loss",
    "a list of terms",
]


plan_for = partial(plan_of, micro_batches=3, rows=ROWS // 3)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_of_slices_are_those_of_the_users_own_module(name: str) -> None:
    """Three micro-batches with unequal numbers of targets, one of them without any."""
    case = case_of(name)
    plain = Plain(case)
    graph = capture_model(case.model, case.batch, loss=case.loss)
    plan = plan_for(len(graph.layer_names), (1, 1, 1))
    expected = plain.run(case.batch, cut_batch(plan, ROWS).micro_batches)
    before = {use.name: held(graph, use.name) for use in graph.parameter_uses if use.requires_grad}
    before = {name: value.detach().clone() for name, value in before.items()}
    player = in_process(graph, plan, case.batch, optimizer=lambda p: SGD(p, lr=1.0))
    assert player.evaluate(case.batch).loss == pytest.approx(float(expected), rel=case.tolerance)
    assert player.step(case.batch).loss == pytest.approx(float(expected), rel=case.tolerance)
    gradients = plain.gradients()
    wrong = [n for n, v in before.items() if not close(v - held(graph, n), gradients[n], case)]
    assert not wrong


def in_process(graph: LayerGraph, plan: Plan, batch: Any, **options: Any) -> Pipeline:
    return Pipeline(
        graph, batch, plan=plan, safety=Safety(transport="in-process"), verify="off", **options
    )


def held(graph, name: str) -> torch.Tensor:
    """A parameter of the captured model."""
    return graph.program.tensors.parameters[name]


def test_ranks_replicas_split_backwards_and_several_batches_give_the_same_loss() -> None:
    names = ["with a masked mean", "BertForPreTraining", "a list of terms"]
    for found in launch_workers(trained_by_ranks, (names,), workers=3, threads=1):
        assert len(found) == 9
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def test_without_a_flush_each_micro_batch_counts_by_its_own_targets() -> None:
    """One stage, an update for each micro-batch: the user's own module on each of them in turn."""
    torch.manual_seed(0)
    model = Heads(SUMS["average of two"]).double()
    x, words, order, mask = heads_batch()
    order[2:4], words[2, 0] = 1, 4
    batch = (x, words, order, mask)
    graph = capture_model(model, batch)
    plain = Plain(case_of("average of two")).model
    plan = plan_for(len(graph.layer_names), (1,), "pipedream")
    player = in_process(graph, plan, batch, optimizer=lambda p: SGD(p, lr=0.1))
    player.step(batch)
    optimizer = SGD(plain.parameters(), lr=0.1)
    for lo in range(0, ROWS, 2):
        plain_step(optimizer, plain(*(leaf[lo : lo + 2] for leaf in batch)))
    trained = dict(model.named_parameters())
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(trained[name], expected, rtol=1e-10, atol=1e-12)


def test_without_a_flush_a_micro_batch_without_targets_changes_nothing_by_them() -> None:
    case = case_of("sum of two")
    graph = capture_model(case.model, case.batch)
    plan = plan_for(len(graph.layer_names), (1,), "pipedream")
    player = in_process(graph, plan, case.batch, optimizer=lambda p: SGD(p, lr=0.1))
    player.step(case.batch)
    assert all(p.isfinite().all() for p in case.model.parameters())


REFUSED = {
    "a function of a loss": lambda m, a, b, s, k: torch.exp(a),
    "root of a mean": lambda m, a, b, s, k: s.square().mean().sqrt(),
    "a product": lambda m, a, b, s, k: a * b,
    "a ratio": lambda m, a, b, s, k: a / b,
    "the larger": lambda m, a, b, s, k: torch.maximum(a, b),
    "a norm": lambda m, a, b, s, k: s.norm(),
    "the largest of all": lambda m, a, b, s, k: s.max() + a,
    "a selection": lambda m, a, b, s, k: a + s[s > 0].square().mean(),
    "a count of activations": lambda m, a, b, s, k: a + s.square().sum() / (s > 0).sum(),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_loss_that_slices_cannot_make_up_is_refused_with_the_line_and_the_remedy(
    name: str,
) -> None:
    model = Heads(REFUSED[name]).double()
    with pytest.raises(BadInput, match=r"test_losses\.py:\d+ `.*lambda.*loss=\[\(1\.0, first\)"):
        capture_model(model, heads_batch())


def test_a_term_of_a_list_that_cannot_be_told_apart_counts_by_rows() -> None:
    def root(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, target).sqrt()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    graph = capture_model(model, (x, y), loss=[(2.0, root), (0.5, functional.l1_loss)])
    plan = plan_for(3, (1, 1))
    player = in_process(graph, plan, (x, y), optimizer=lambda p: SGD(p, lr=1.0))
    output = model(x).detach()
    parts = [root(output[lo : lo + 2], y[lo : lo + 2]) for lo in (0, 2, 4)]
    expected = 2 * sum(parts) / 3 + 0.5 * functional.l1_loss(output, y)
    assert player.step((x, y)).loss == pytest.approx(float(expected), rel=1e-12)


def test_one_cross_entropy_is_left_as_it_is() -> None:
    """Nothing is computed of the whole batch, and no leaf is added to it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    batch = (torch.randn(6, 3), torch.randint(2, (6,)))
    for loss in (functional.cross_entropy, lambda o, t: 0.5 * functional.cross_entropy(o, t)):
        graph = capture_model(model, batch, loss=loss)
        assert len(graph.batch_leaves(batch)) == 2
        assert graph.stage(range(3)).module(*batch)[1] == 6


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ([], "empty list"),
        ([(1.0, 2.0)], "entry 0 of loss"),
        ([functional.mse_loss], "entry 0 of loss"),
        ("mse", "loss is a str"),
    ],
)
def test_a_loss_that_is_no_function_and_no_list_of_pairs_is_refused(loss, message) -> None:
    batch = (torch.randn(6, 3), torch.randn(6, 2))
    with pytest.raises(BadInput, match=message):
        capture_model(nn.Linear(3, 2), batch, loss=loss)


def test_a_step_on_batches_of_different_lengths_counts_the_targets_of_all() -> None:
    """Counts of targets add up; a divisor that does not is refused."""

    class Words(nn.Module):
        def __init__(self, clamped: bool) -> None:
            super().__init__()
            self.embed, self.head, self.clamped = nn.Embedding(9, 4), nn.Linear(4, 9), clamped

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores = self.head(self.embed(x))
            first = functional.cross_entropy(scores.transpose(1, 2), y)
            valid = (y >= 0).sum()
            return first + scores.square().sum() / (valid.clamp(min=2) if self.clamped else valid)

    torch.manual_seed(0)
    batches = []
    for length in (5, 3):
        x, y = torch.randint(9, (2, length)), torch.randint(9, (2, length))
        y[0, 1:] = -100
        batches.append((x, y))
    for clamped in (False, True):
        model = Words(clamped).double()
        dynamic = {0: {1: Length("length", max=8)}, 1: {1: "length"}}
        graph = capture_model(model, batches[0], dynamic=dynamic)
        leaves = [graph.batch_leaves(batch) for batch in batches]
        if clamped:
            with pytest.raises(BadInput, match="different lengths"):
                graph.as_one_step(leaves)
            continue
        module = graph.stage(range(len(graph.layer_names))).module
        parts = [module(*own) for own in graph.as_one_step(leaves)]
        found = sum(value * weight for value, weight in parts) / 4
        padded = [
            torch.cat([functional.pad(b[i], (0, 5 - b[i].shape[1]), value=v) for b in batches])
            for i, v in ((0, 0), (1, -100))
        ]
        scores = model.head(model.embed(padded[0]))
        valid = padded[1] >= 0
        squares = sum(model.head(model.embed(x)).square().sum() for x, _ in batches)
        first = functional.cross_entropy(scores.transpose(1, 2), padded[1])
        torch.testing.assert_close(found, first + squares / valid.sum(), rtol=1e-12, atol=0)
