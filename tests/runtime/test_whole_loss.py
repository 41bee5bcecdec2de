"""A loss function that mixes the samples of a batch is computed once, on all of them."""

import copy
import warnings
from typing import Any

import pytest
import torch
from runtime.whole_loss_cases import (
    LOSSES,
    ROWS,
    Towers,
    batch_of,
    compared,
    compared_lengths,
    contrast,
    plans,
)
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_loss_gradients_and_metrics_are_those_of_one_process(ranks: int) -> None:
    for found in launch_workers(compared, (ranks,), workers=ranks, threads=1):
        assert {name.partition(",")[0] for name in found} == {*LOSSES}
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_lengths_may_vary() -> None:
    for found in launch_workers(compared_lengths, (), workers=3, threads=1):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
        assert len(found) == 4


def captured(model: nn.Module | None = None, loss: Any = contrast, **options: Any) -> LayerGraph:
    torch.manual_seed(0)
    return capture_model(model or Towers().double(), batch_of(), loss=loss, **options)


def in_process(graph: LayerGraph, schedule: str = "gpipe", **options: Any) -> Pipeline:
    plan = plans(len(graph.layer_names), 2)["two stages"]
    plan = type(plan)(plan.stages, plan.micro_batches, plan.micro_batch_size, schedule)
    safety = Safety(transport="in-process")
    return Pipeline(graph, batch_of(), plan=plan, safety=safety, **options)


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (
            "1f1b",
            {},
            "backward of its last stage comes before some forward; use schedule 'gpipe', or",
        ),
        ("zb-h1", {}, "use schedule 'gpipe', or give the loss as a list"),
    ],
)
def test_what_it_does_not_run_with_is_refused(
    schedule: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(
        BadInput, match=r"a loss over the whole batch \('.*whole_loss_cases.py"
    ) as found:
        in_process(captured(), schedule, **options)
    assert words in str(found.value)


def test_several_batches_in_a_step_are_refused_and_leave_the_pipeline_as_it_was() -> None:
    with in_process(captured()) as pipe:
        whole = pipe.step(batch_of()).loss
        with pytest.raises(BadInput, match=r"a step of 2 batches, but the loss needs all samples"):
            pipe.step(batch_of(), batch_of())
        assert pipe.step(batch_of()).loss == whole


def test_as_a_list_it_is_averaged_over_micro_batches_and_told() -> None:
    graph = captured(loss=[(1.0, LOSSES["spread"])])
    assert not graph.whole_loss
    assert graph.mixing
    lines: list[str] = []
    with in_process(graph, "1f1b", verify="off") as pipe:
        pipe.print_with(lines.append)
        found = pipe.step(batch_of()).loss
    plain, parts = graph.model, [batch_of()[key].split(4) for key in ("picture", "text")]
    each = [
        LOSSES["spread"](plain(p, t), {"picture": p, "text": t})
        for p, t in zip(*parts, strict=True)
    ]
    assert found == pytest.approx(float(torch.stack(each).mean().detach()), rel=1e-9)


class Aside(nn.Module):
    """A second layer reads the first one's result without its gradient; the loss reads it with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.aside = nn.Linear(5, 5)

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        early = self.first(picture)
        return {"picture": early, "text": self.aside(early.detach()), "factor": text.sum()}


def test_a_gradient_that_comes_from_the_loss_alone_reaches_the_stage_before() -> None:
    def spread(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        return LOSSES["spread"]({**output, "factor": torch.ones(())}, batch)

    graph = captured(Aside().double(), spread)
    plain, batch = copy.deepcopy(graph.model), batch_of()
    spread(plain(batch["picture"], batch["text"]), batch).backward()
    layers = len(graph.layer_names)
    plan = Plan((Stage(range(1), (0,), (4,)), Stage(range(1, layers), (1,), (4,))), 3, 4, "gpipe")
    safety = Safety(transport="in-process")
    with Pipeline(graph, batch, plan=plan, safety=safety, verify="off") as pipe:
        pipe.step(batch)
        for name, parameter in pipe.named_parameters():
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12, msg=name)


class Learned(nn.Module):
    """A contrast with a parameter behind the products of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, output: Any, batch: Any) -> torch.Tensor:
        """As `contrast`."""
        return functional.cross_entropy(
            output["picture"] @ output["text"].T * self.factor, batch["pair"]
        )


class Within(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers()

    def forward(self, picture: torch.Tensor, text: torch.Tensor, pair: torch.Tensor) -> Any:
        """The contrast."""
        return contrast(self.towers(picture, text), {"pair": pair})


@pytest.mark.parametrize("case", ["a parameter", "in the model", "random", "two kinds of batches"])
def test_what_is_more_than_a_function_of_the_samples_stays_that_of_micro_batches(case: str) -> None:
    def noisy(output: Any, batch: Any) -> torch.Tensor:
        scores = output["picture"] @ output["text"].T
        return functional.cross_entropy(functional.dropout(scores, 0.5), batch["pair"])

    match case:
        case "a parameter":
            graph = captured(loss=Learned().double())
        case "in the model":
            graph = captured(Within().double(), None)
        case "random":
            graph = captured(loss=noisy)
        case _:
            other = {**batch_of(), "more": batch_of()["text"]}
            graph = captured(other_examples=[other])
    assert not graph.whole_loss
    assert graph.mixing.startswith("it mixes samples (")


def test_float16_scales_the_loss_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = Towers()
    plain, batch = copy.deepcopy(model), {k: v.float() for k, v in batch_of().items()}
    batch["pair"] = batch_of()["pair"]
    with torch.autocast("cpu", torch.float16):
        expected = contrast(plain(batch["picture"], batch["text"]), batch)
    (expected * 1024).backward()
    graph = capture_model(model, batch, loss=contrast, autocast=torch.float16)
    options: dict[str, Any] = {"autocast": torch.float16, "verify": "off"}
    plan = plans(len(graph.layer_names), 2)["two stages"]
    safety = Safety(transport="in-process")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options["optimizer"] = lambda p: torch.optim.SGD(p, lr=1.0)  # pyright: ignore
    with Pipeline(graph, batch, plan=plan, safety=safety, **options) as pipe:
        step = pipe.step(batch)
        assert not step.skipped
        assert step.loss == pytest.approx(float(expected.detach()), rel=2e-3)
        for name, parameter in pipe.named_parameters():
            slope = dict(plain.named_parameters())[name].grad
            assert slope is not None
            gap = (before[name] - parameter.detach() - slope / 1024).abs().max()
            assert gap <= 1e-2 * (slope / 1024).abs().max() + 1e-4, name


def test_beside_batch_norm_each_is_what_it_is_and_the_step_is_not_compared() -> None:
    class Normed(Towers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, picture: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(self.norm(picture), text)

    graph = captured(Normed().double())
    plain = copy.deepcopy(graph.model)
    batch = batch_of()
    lines: list[str] = []
    with in_process(graph) as pipe:
        pipe.print_with(lines.append)
        found = pipe.step(batch).loss
        assert "the loss is of the whole batch, but it mixes samples (BatchNorm1d" in str(
            pipe.verified
        )
    parts = zip(batch["picture"].split(4), batch["text"].split(4), strict=True)
    outputs = [plain(*part) for part in parts]
    joined = {key: torch.cat([own[key] for own in outputs]) for key in ("picture", "text")}
    expected = contrast({**joined, "factor": outputs[0]["factor"]}, batch)
    assert found == pytest.approx(float(expected.detach()), rel=1e-9)
    assert len(batch["pair"]) == ROWS
    assert (
        "not for the 12 samples of a step at once, because it mixes samples (BatchNorm" in lines[0]
    )


def test_no_warning_is_given_where_all_is_exact() -> None:
    lines: list[str] = []
    with warnings.catch_warnings(), in_process(captured()) as pipe:
        warnings.simplefilter("error")
        pipe.print_with(lines.append)
        pipe.step(batch_of())
    assert [line.partition(":")[0] for line in lines] == ["step 1"]
    assert "equal to your module on the whole batch" in lines[0]
