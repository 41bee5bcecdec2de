"""Batches of two kinds that alternate: real ranks, and the same training as in plain torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kind_models import Captions, batch_of, captions, decaying, loss_of, plain_step
from runtime.kind_cases import KINDS, off, plan_of, run_kinds, run_refused

from penstock.capture.batch.lengths import Dynamic, Length
from penstock.capture.batch.part import BatchPart
from penstock.capture.capture import capture_model
from penstock.errors import BadInput, RunFailed
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers

PLANS = {
    "the picture's layers are on the first rank": (plan_of((0, 4), (1, 1), "1f1b"), "auto"),
    "they are apart, and idle without one": (plan_of((0, 1, 3), (1, 1, 1), "zb-h1"), "auto"),
    "they are divided, and replicated": (plan_of((0, 2), (2, 1), "gpipe"), "process-groups"),
}


@pytest.mark.parametrize("case", PLANS)
def test_two_kinds_of_batches_train_as_in_plain_torch(case: str, tmp_path: Path) -> None:
    plan, transport = PLANS[case]
    arguments = (plan, KINDS, transport, str(tmp_path))
    for wrong in launch_workers(run_kinds, arguments, workers=len(plan.ranks), threads=1):
        assert not wrong


def test_the_second_kind_may_come_first(tmp_path: Path) -> None:
    arguments = (plan_of((0, 4), (1, 1), "1f1b"), (1, 1, 0, 1), "auto", str(tmp_path))
    assert launch_workers(run_kinds, arguments, workers=2, threads=1) == ([], [])


def test_other_batches_are_refused_on_all_ranks_and_change_nothing() -> None:
    first, second = launch_workers(run_refused, (), workers=2, threads=1)
    for unknown, flat, mixed, unlike, one, unchanged in (first, second):
        assert "BadInput: the batch has the keys ['labels', 'picture', 'sound', 'words']" in unknown
        assert "give a batch like it at capture, too: other_examples=[..., batch]" in unknown
        assert "batch['picture'] has shape (6, 7): dimension 1 is 7, but was 6 at" in flat
        assert "the 2 batches of one step are of 2 kinds, and must be of one" in mixed
        assert "the number of its example is 1 on rank 1 and 0 on rank 0" in unlike
        assert one
        assert unchanged == "unchanged: True"
    assert "sound" in second[4]
    assert "different batches" in first[4]


def train_head(model: Captions, *, alone: bool) -> None:
    model.requires_grad_(not alone)
    model.head.requires_grad_(True)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_one_process_holds_all_stages_of_both_kinds(cut: int) -> None:
    """Two stages on one device; lengths vary, calls are checked, and layers are thawed."""
    model, reference = captions(), captions()
    optimizer = decaying(reference.parameters())
    stages = tuple(Stage(layers, (0,), (2,)) for layers in (range(cut), range(cut, 8)))
    plan = Plan(stages, 3, 2, "interleaved")
    for own in (model, reference):
        train_head(own, alone=True)
    dynamic: Dynamic = {"words": {1: Length("length", max=9)}, "labels": {1: "length"}}
    graph = capture_model(
        model, batch_of(0), loss=loss_of, dynamic=dynamic, other_examples=[batch_of(1)]
    )
    with Pipeline(
        graph, batch_of(0), plan=plan, optimizer=decaying, safety=Safety(check_every=2)
    ) as pipe:
        for step, kind in enumerate(KINDS):
            for own in (model, reference):
                train_head(own, alone=step < 3)
            batch = batch_of(kind, 6, step, 3 + step % 4)
            assert pipe.lengths_of(batch) == {"length": 3 + step % 4}
            assert off("loss", pipe.step(batch).loss, plain_step(reference, optimizer, batch)) == []
    for name, value in model.named_parameters():
        assert off(name, value, reference.get_parameter(name)) == []


def test_verify_compares_the_calls_of_the_kind_of_its_batch() -> None:
    """The last step was of the first kind, and the forward of the other has changed since."""
    model = captions()
    plan = Plan((Stage(range(8), (0,), (2,)),), 3, 2, "1f1b")
    examples = [batch_of(1)]
    graph = capture_model(model, batch_of(0), loss=loss_of, other_examples=examples)
    with Pipeline(graph, batch_of(0), plan=plan, verify="off") as pipe:
        for kind in (1, 0):
            pipe.step(batch_of(kind))

        def backwards(words: torch.Tensor) -> torch.Tensor:
            x = model.words(words)
            for block in reversed(model.blocks):
                x = x + block(x)
            return model.head(x)

        model.forward = backwards  # type: ignore[method-assign, assignment]
        with pytest.raises((BadInput, RunFailed), match="where the example called"):
            pipe.verify(batch_of(1))


PLAN = plan_of((0,), (1,), "1f1b")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([batch_of(1)], "two batches are in the pipeline at once"),
        (batch_of(1), "other_examples is a dict, but must be a list of batch"),
        ([batch_of(1), batch_of(0)], "examples 0 and 2 have the same keys"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(examples: Any, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        graph = capture_model(captions(), batch_of(0), loss=loss_of, other_examples=examples)
        plan = replace(PLAN, schedule="pipedream")
        Pipeline(graph, batch_of(0), plan=plan, optimizer=decaying)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_part_of_a_batch_is_refused_as_it_shows_no_kind() -> None:
    graph = capture_model(captions(), batch_of(0), loss=loss_of, other_examples=[batch_of(1)])
    with Pipeline(graph, batch_of(0), plan=PLAN) as pipe:
        with pytest.raises(BadInput, match="a model with other_examples needs whole batches"):
            pipe.step(BatchPart(0, 6, {**batch_of(1)}))
        with pytest.raises(BadInput, match="a model with other_examples needs whole batches"):
            _ = pipe.needs
