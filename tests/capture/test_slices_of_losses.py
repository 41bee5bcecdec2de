"""Losses of micro-batches of five and three samples add up to that of the batch, or say why not."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture.staged_runs import StagedRun, gap
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput

Loss = Callable[[Any, Any], Any]

MAKE = torch.Generator().manual_seed(0)
WORDS = torch.tensor([0, 1, -100, 2, -100, -100, 4, 3])
NONE_IN_THE_SECOND = torch.tensor([0, 1, 2, 3, 4, -100, -100, -100])
SHARES = torch.rand(8, 5, generator=MAKE).double().softmax(-1)
NUMBERS = torch.randn(8, 5, generator=MAKE).double()
SIGNS = torch.tensor([1.0, -1, 1, 1, -1, 1, -1, -1]).double()
FLAGS = (torch.rand(8, 5, generator=MAKE) > 0.5).double()
KEPT = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1]).double()
CLASSES = torch.tensor([1.0, 5.0, 0.2, 2.0, 1.0]).double()


def focal(output: Any, words: Any) -> Any:
    each = functional.cross_entropy(output, words, reduction="none")
    kept = words != -100
    return ((1 - (-each).exp()) ** 2 * each)[kept].mean()


def old_sum(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return functional.mse_loss(o, y, size_average=False)


def clipped(output: Any, gains: Any) -> Any:
    gains = (gains - gains.mean()) / gains.std()
    ratio = output.sum(1).exp()
    return -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()


RIGHT: dict[str, tuple[torch.Tensor, Loss]] = {
    "cross entropy": (WORDS, functional.cross_entropy),
    "with classes, smoothing": (
        WORDS,
        lambda o, y: functional.cross_entropy(o, y, CLASSES, label_smoothing=0.2),
    ),
    "a slice without targets": (NONE_IN_THE_SECOND, functional.cross_entropy),
    "shares as targets": (SHARES, functional.cross_entropy),
    "negative log likelihood": (
        WORDS,
        lambda o, y: functional.nll_loss(o.log_softmax(-1), y, CLASSES),
    ),
    "flags": (FLAGS, functional.binary_cross_entropy_with_logits),
    "divergence by batch": (
        SHARES,
        lambda o, y: functional.kl_div(o.log_softmax(-1), y, reduction="batchmean"),
    ),
    "scaled": (WORDS, lambda o, y: 0.5 * functional.cross_entropy(o, y)),
    "rows": (WORDS, lambda o, y: functional.cross_entropy(o, y, reduction="none").mean()),
    "a sum": (NUMBERS, lambda o, y: functional.huber_loss(o, y, reduction="sum")),
    "a sum as it was once asked for": (NUMBERS, old_sum),
    "a sum and a mean": (NUMBERS, lambda o, y: functional.mse_loss(o, y) + o.square().sum()),
    "a sum by samples": (NUMBERS, lambda o, y: (o - y).square().sum() / o.shape[0]),
    "a ranking": (SIGNS, lambda o, y: functional.margin_ranking_loss(o[:, 0], o[:, 1], y)),
    "focal over valid targets": (WORDS, focal),
    "masked targets": (WORDS, lambda o, y: functional.cross_entropy(o[y != -100], y[y != -100])),
    "weighted by a column": (KEPT, lambda o, y: (o.square().sum(1) * y).sum() / y.sum()),
    "weighted before the sum": (KEPT, lambda o, y: (o.square().sum(1) * y / y.sum()).sum()),
    "divided by a number": (KEPT, lambda o, y: (o.square().sum(1) * y).sum() / y.sum().item()),
    "over what is kept": (KEPT, lambda o, y: o.square().sum(1)[y > 0].mean()),
    "two terms": (
        WORDS,
        lambda o, y: functional.cross_entropy(o, y) + 0.01 * o.logsumexp(-1).square().mean(),
    ),
    "with a constant of the batch": (KEPT, lambda o, y: o.square().mean() + y.sum()),
    "where there are any": (
        KEPT,
        lambda o, y: torch.where(y.sum() > 3, o.square().mean(), o.abs().mean()),
    ),
    "clipped gains": (NUMBERS[:, 0], clipped),
    "targets normalised over the batch": (
        NUMBERS,
        lambda o, y: functional.mse_loss(o, (y - y.mean(0)) / y.std(0)),
    ),
    "targets between 0 and 1": (
        NUMBERS,
        lambda o, y: functional.smooth_l1_loss(o, (y - y.min()) / (y.max() - y.min())),
    ),
    "targets less a number": (NUMBERS, lambda o, y: functional.l1_loss(o, y - y.mean().item())),
    "targets times the rows": (NUMBERS, lambda o, y: functional.mse_loss(o, y * len(y))),
    "classes weighted by their counts": (
        WORDS.clamp(min=0),
        lambda o, y: functional.cross_entropy(o, y, 1 / (1.0 + y.bincount(minlength=5)).double()),
    ),
    "flags weighted by their counts": (
        FLAGS,
        lambda o, y: functional.binary_cross_entropy_with_logits(
            o, y, pos_weight=(1 - y).sum(0) / (1 + y.sum(0))
        ),
    ),
    "a threshold of the batch": (
        NUMBERS,
        lambda o, y: functional.huber_loss(o, y, delta=float(y.abs().quantile(0.3))),
    ),
    "the place of a target": (
        WORDS.clamp(min=0),
        lambda o, y: -o.log_softmax(-1)[torch.arange(len(o)), y].mean(),
    ),
    "less the first sample": (NUMBERS, lambda o, y: functional.mse_loss(o, y - y[0])),
    "a branch on a target of one slice": (
        NUMBERS,
        lambda o, y: (
            functional.mse_loss(o, y) if bool((y == NUMBERS[0, 0]).any()) else (o - y).sum()
        ),
    ),
    "as many parts as there are different targets": (
        torch.tensor([0.0, 1, 2, 3, 4, 0, 1, 0]).double(),
        lambda o, y: (o.sum(1) - y).square().sum() / len(y.unique()),
    ),
    "squares over what is kept": (
        KEPT,
        lambda o, y: functional.mse_loss(o.sum(1)[y > 0], torch.ones(int((y > 0).sum())).double()),
    ),
}


def network() -> nn.Sequential:
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)]
    return nn.Sequential(*layers).double()


def inputs() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(7)).double()


def in_slices(model: nn.Module, target: Any, loss: Loss | None, example: Any = None) -> StagedRun:
    """A model's stages, after a step of unequal slices with loss and gradients of the plain model.

    The ``example`` has other targets, if it is given.
    """
    plain = copy.deepcopy(model)
    own = StagedRun(model, (inputs(), target if example is None else example), loss=loss)
    wanted = plain(inputs(), target) if loss is None else loss(plain(inputs()), target)
    wanted.backward()
    assert own.step((inputs(), target), (5, 3)) == pytest.approx(float(wanted.detach()), rel=1e-9)
    for key, parameter in plain.named_parameters():
        found = own.gradient(key)
        assert found is not None and parameter.grad is not None
        assert gap(found, parameter.grad) < 1e-9, key
    return own


@pytest.mark.parametrize("name", RIGHT)
def test_slices_add_up_to_the_whole(name: str) -> None:
    assert in_slices(network(), *RIGHT[name]).last.mixing == ""


EVERY = torch.ones(8, dtype=torch.bool)
SOME = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0]).bool()
NONE_OF_THE_SECOND = torch.tensor([1, 0, 1, 1, 1, 0, 0, 0]).bool()
MASKED: dict[str, Loss] = {
    "a mean": lambda o, t: (o - t[0])[t[1]].square().mean(),
    "a loss function": lambda o, t: functional.mse_loss(o[t[1]], t[0][t[1]]),
    "selected of columns": lambda o, t: torch.masked_select((o - t[0]).abs(), t[1][:, None]).mean(),
    "selected of all": lambda o, t: (
        (o - t[0]).masked_select(t[1][:, None].expand_as(o)).square().mean()
    ),
    "a sum by what is kept": lambda o, t: (o - t[0])[t[1]].square().sum() / o[t[1]].shape[0],
    "flattened": lambda o, t: (o - t[0])[t[1]].flatten().square().mean(),
}


@pytest.mark.parametrize("example", [EVERY, SOME], ids=["every", "some"])
@pytest.mark.parametrize("mask", [SOME, NONE_OF_THE_SECOND, EVERY], ids=["some", "none", "every"])
@pytest.mark.parametrize("name", MASKED)
def test_a_mean_over_a_mask_is_of_what_the_mask_has_now(
    name: str, mask: torch.Tensor, example: torch.Tensor
) -> None:
    """Though all of it may be true in the example, as if the samples decided about its size."""
    in_slices(network(), (NUMBERS, mask), MASKED[name], (NUMBERS, example))


REFUSED: dict[str, tuple[torch.Tensor, Loss]] = {
    "a root of a mean": (NUMBERS, lambda o, y: functional.mse_loss(o, y).sqrt()),
    "the larger of two": (
        NUMBERS,
        lambda o, y: torch.maximum(functional.mse_loss(o, y), functional.l1_loss(o, y)),
    ),
    "a median": (NUMBERS, lambda o, y: (o - y).abs().median()),
    "a ratio of sums": (FLAGS, lambda o, y: (o.sigmoid() * y).sum() / (o.sigmoid().sum() + 1)),
}


class Inside(nn.Module):
    """A model that returns its loss, which is always computed by slices."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.network, self.loss = network(), loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.loss(self.network(x), target)


@pytest.mark.parametrize("name", REFUSED)
def test_what_slices_cannot_make_up_is_refused_with_the_line(name: str) -> None:
    target, loss = REFUSED[name]
    with pytest.raises(BadInput, match=r"test_slices_of_losses\.py:\d+ `.*list the terms"):
        StagedRun(Inside(loss), (inputs(), target))


class TargetsFirst(Inside):
    """Every stage but the first reads targets that were normalised over the batch before it."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.network[0](x)
        target = (target - target.mean(0)) / target.std(0)
        return self.loss(self.network[3:](self.network[1:3](x) + target[:, :1]), target)


def test_values_of_the_whole_step_may_be_taken_before_the_last_stage() -> None:
    in_slices(TargetsFirst(functional.mse_loss), NUMBERS, None)


class Flagged(Inside):
    """It asks whether something holds, and adds 1, which is equal to True."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        if not bool(x.isfinite().all()):
            raise ValueError
        return self.loss(self.network(x), target + 1)


def test_a_flag_that_is_asked_for_is_no_number_of_the_batch() -> None:
    graph = capture_model(Flagged(functional.mse_loss), (inputs(), NUMBERS))
    assert graph.loss_mode == "rows"


TOLD: dict[str, Loss] = {
    "a spread over the samples": (
        lambda o, y: functional.mse_loss(o, y) + functional.relu(1 - o.std(0)).mean()
    ),
    "a distance from the mean sample": lambda o, y: (o - o.mean(0)).square().mean(),
    "ranks of targets": lambda o, y: functional.mse_loss(o, 1.0 * y.argsort(0).argsort(0)),
    "targets of other samples": lambda o, y: functional.mse_loss(o, y.flip(0) + y.roll(1, 0)),
    "weights that add up to 1": lambda o, y: ((o - y).square() * y.softmax(0)).sum(),
    "steps from sample to sample": lambda o, y: functional.mse_loss(o[1:], y[1:] - y[:-1]),
    "steps of targets": lambda o, y: functional.mse_loss(o, y.diff(dim=0, prepend=y[:1])),
    "targets normalised as a layer": (
        lambda o, y: functional.mse_loss(o, functional.layer_norm(y.t(), (len(y),)).t())
    ),
    "distances between targets": (
        lambda o, y: (o.square().sum(1) * torch.cdist(y, y).mean(1)).mean()
    ),
    "samples in another order": (
        lambda o, y: functional.mse_loss(o[torch.arange(len(o) - 1, -1, -1)], y)
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_takes_samples_together_is_told(name: str) -> None:
    own = StagedRun(Inside(TOLD[name]), (inputs(), NUMBERS))
    assert own.last.mixing.startswith("it mixes samples (")


@pytest.mark.parametrize("name", [*TOLD, *REFUSED])
def test_a_loss_function_that_takes_samples_together_is_a_layer_of_its_own(name: str) -> None:
    target, loss = REFUSED[name] if name in REFUSED else (NUMBERS, TOLD[name])
    graph = capture_model(network(), (inputs(), target), loss=loss)
    assert "test_slices_of_losses.py" in graph.whole_loss
    assert graph.layer_names[-1] == "loss"
    assert not graph.mixing
