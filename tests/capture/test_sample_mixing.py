"""Whether samples act on one another is read off the record."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain

VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
BATCH = VALUES, torch.tensor([0, 1, 2, 0, 1, 2])


class Scores(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.after(self.layer(x))


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counts = (target > 0).float()
    return ((output.square().sum(1) * counts).sum() / counts.sum().clamp(min=1)) * 2 + 1


def router_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chances = output.softmax(1)
    used = functional.one_hot(target, 3).float().mean(0)
    return functional.cross_entropy(output, target) + (chances.mean(0) * used).sum()


def balance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.softmax(1).mean(0).square().sum()


def in_batch_negatives(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output @ output.t(), torch.arange(output.shape[0]))


def root(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().mean().sqrt()


def mixing(
    after: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
    loss: Callable[..., torch.Tensor] = functional.cross_entropy,
) -> str:
    # Listed as a term: where it is neither a mean nor a sum, it counts by rows.
    return capture_model(Scores(after), BATCH, loss=[(1.0, loss)]).mixing


@pytest.mark.parametrize(
    "after",
    [
        torch.tanh,
        lambda x: x.softmax(1),
        lambda x: functional.layer_norm(x, (3,)),
        lambda x: x.flip(1).cumsum(1),
        lambda x: x.topk(3)[0] + x.sort(stable=True)[0],
        lambda x: x - x.mean(1, keepdim=True),
    ],
)
def test_rows_of_one_sample_do_not_mix(after: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert mixing(after) == ""


@pytest.mark.parametrize("loss", [masked_mean, router_loss])
def test_means_over_samples_that_are_added_up_do_not_mix(
    loss: Callable[..., torch.Tensor],
) -> None:
    assert mixing(loss=loss) == ""


class Whitened(Scores):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / float(x.abs().max()))


class Statistic(Scores):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (lambda x: x - x.mean(0), "'sub' takes a statistic of the samples' activations at"),
        (lambda x: x / x.detach().max(), "'div' takes a statistic of the samples' activations at"),
        (lambda x: x.softmax(0), "'softmax' along the samples at"),
        (lambda x: x.flip(0), "'flip' along the samples at"),
        (lambda x: functional.batch_norm(x, None, None, training=True), "batch normalisation"),
    ],
)
def test_rows_made_of_other_samples_mix(
    after: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    assert mixing(after).startswith(f"it mixes samples ({words} ")
    assert "test_sample_mixing.py:" in mixing(after)


@pytest.mark.parametrize("kind", [Whitened, Statistic])
def test_a_module_that_is_given_statistics_of_the_batch_mixes(kind: type[Scores]) -> None:
    graph = capture_model(kind(torch.tanh), BATCH, loss=functional.cross_entropy)
    assert graph.mixing.startswith("it mixes samples ('layer' is given a statistic of the samples")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (balance, "'square' at .* is computed from sums over samples"),
        (in_batch_negatives, "'matmul' compares samples with each other at"),
        (root, "a term of the loss is neither a mean nor a sum over samples"),
    ],
)
def test_losses_that_do_not_add_up_over_samples_mix(
    loss: Callable[..., torch.Tensor], words: str
) -> None:
    assert re.search(rf"it mixes samples \({words}", mixing(loss=loss))


def test_a_batch_norm_is_named_unless_it_is_frozen() -> None:
    norm = nn.BatchNorm1d(3)
    assert mixing(norm) == "it mixes samples (BatchNorm1d 'after')"
    assert mixing(norm.eval()) == ""


def test_a_chain_is_known_by_its_batch_norms_and_buffers() -> None:
    layers = [nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)]
    with_norm = capture_model(Chain(layers, functional.cross_entropy), BATCH)
    assert with_norm.mixing == "it mixes samples (BatchNorm1d '1')"
    without = capture_model(Chain(layers[:1], functional.cross_entropy), BATCH)
    assert without.mixing == ""
