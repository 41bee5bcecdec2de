"""Parts of a loss are logged as one process has them on the whole batch, with unequal targets."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from penstock import BadInput, Pipeline, Plan, Safety, Stage, capture_model

IGNORED = -100


def masked(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    counted = y != IGNORED
    every = cross_entropy(logits, y.clamp(min=0), reduction="none")
    return (every * counted).sum() / counted.sum()


def mean_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, y, ignore_index=IGNORED)


def summed(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum")


class Parts(nn.Module):
    """Returns its loss with the parts of it, and what is none."""

    def __init__(self, words: Callable[..., torch.Tensor], share: float) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.words, self.share = words, share

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.inner(x))
        logits = self.head(hidden)
        words = self.words(logits.flatten(0, 1), y.flatten())
        size, largest = hidden.square().mean(), logits.abs().mean()
        loss = 2 * words + self.share * size if self.share else 2 * words
        return {
            "loss": loss,
            "losses": {"words": words, "size": size},
            "largest": largest,
            "perplexity": words.exp(),
            "both": words + largest,
            "logits": logits,
        }


def built(words: Callable[..., torch.Tensor], share: float) -> Parts:
    torch.manual_seed(0)
    return Parts(words, share).double()


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(5, (8, 4), generator=generator)
    y[:3, 1:] = IGNORED
    y[4] = IGNORED
    return {"x": x, "y": y}


def pipeline(model: nn.Module, metrics: Any) -> Pipeline:
    graph = capture_model(model, batch(0))
    layers = len(graph.layer_names)
    plan = Plan((Stage(range(1), (0,), (2,)), Stage(range(1, layers), (1,), (2,))), 4, 2, "1f1b")
    return Pipeline(
        graph, batch(0), plan=plan, metrics=metrics, safety=Safety(transport="in-process")
    )


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("words", [mean_entropy, masked, summed])
def test_parts_are_those_of_the_whole_batch(
    words: Callable[..., torch.Tensor], share: float
) -> None:
    names = {"words": "losses.words", "largest": "largest"}
    functions = {"size": lambda output, _: output["losses"]["size"]}
    if share:
        names["by_name"] = "losses.size"
    with torch.no_grad():
        model = built(words, share)
        one, two = model(**batch(1)), model(**batch(2))
        both = model(**{key: torch.cat([batch(1)[key], batch(2)[key]]) for key in ("x", "y")})
    with pipeline(built(words, share), names | functions) as pipe:
        found = pipe.evaluate(batch(1)), pipe.evaluate(batch(2)), pipe.step(batch(1), batch(2))
    for ours, theirs in zip(found, (one, two, both), strict=True):
        assert ours.loss == pytest.approx(float(theirs["loss"]), rel=1e-12)
        expected = {"words": theirs["losses"]["words"], "largest": theirs["largest"]}
        expected |= {"size": theirs["losses"]["size"], "by_name": theirs["losses"]["size"]}
        for name, value in ours.metrics.items():
            assert value == pytest.approx(float(expected[name]), rel=1e-12), name


def test_what_slices_do_not_tell_is_refused_by_name_and_nan_in_functions() -> None:
    for path in ("perplexity", "both"):
        with pytest.raises(BadInput, match=f"'{path}' is no part of the loss of Parts and no mean"):
            pipeline(built(masked, 0.5), {"m": path})
    for path in ("losses.word", "loss", "losses"):
        with pytest.raises(BadInput, match=f"'{path}' names no tensor in what Parts returns"):
            pipeline(built(masked, 0.5), {"m": path})
    with pytest.raises(BadInput, match=r"metric 'm' is a int; .*'losses.words'"):
        pipeline(built(masked, 0.5), {"m": 3})
    given = {"perplexity": lambda output, _: output["perplexity"]}
    for words in (masked, mean_entropy):
        with pipeline(built(words, 0.5), given) as pipe:
            assert math.isnan(pipe.step(batch(1)).metrics["perplexity"])


class Balanced(nn.Module):
    """A router's loss that multiplies two means over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router, self.after = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.inner(x))
        chances = self.router(hidden.mean(1)).softmax(1)
        chosen = nn.functional.one_hot(chances.argmax(1), 4).double().mean(0)
        balance = 4 * (chosen * chances.mean(0)).sum()
        return {
            "loss": masked(self.after(hidden).flatten(0, 1), y.flatten()) + balance,
            "b": balance,
        }


def test_a_balance_loss_is_that_of_micro_batches_in_the_loss_and_as_a_metric() -> None:
    torch.manual_seed(0)
    model, whole = Balanced().double(), batch(1)
    with torch.no_grad():
        parts = [model(*(whole[key][i : i + 2] for key in "xy"))["b"] for i in range(0, 8, 2)]
        expected = sum(map(float, parts)) / len(parts)
        assert abs(expected - float(model(**whole)["b"])) > 1e-3
    with pipeline(model, {"by_name": "b", "given": lambda output, _: output["b"]}) as pipe:
        found = pipe.step(whole).metrics
        assert "micro-batch by micro-batch" in str(pipe.verified)
    assert found == {name: pytest.approx(expected, rel=1e-12) for name in ("by_name", "given")}
