"""Numbers that a loss takes from its own values: those of the batch, or refused; logs are free."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain_training import plain_step
from runtime.loss_check_cases import ROWS, batches, net
from torch import nn
from torch.nn import functional

from penstock import BadInput, Pipeline, Plan, Safety, Stage, capture_model

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
log: list[Any] = []


def terms(o: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return functional.cross_entropy(o, y), o.square().mean()


def balanced(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = terms(o, y)
    return a + b * (a.item() / b.item())


def added(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = terms(o, y)
    return a + float(b)


def weighed_by_tensor(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    every = terms(o, y)
    weights = torch.tensor([float(term) for term in every], dtype=o.dtype).softmax(0)
    return weights[0] * every[0] + weights[1] * every[1]


def by_list(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = functional.cross_entropy(o, y, reduction="none")
    return rows.mean() * max(rows.tolist())


def by_numpy(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, _ = terms(o, y)
    return a / float(np.asarray(a.detach())) * a.detach().numpy().item()


def by_threshold(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = terms(o, y)
    return 2 * a if b.item() > 0.1 else a


def hardest(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = functional.cross_entropy(o, y, reduction="none")
    return rows.sort().values[-int((rows > 1.4).sum()) :].mean()


class RunningScale(nn.Module):
    """Divides the loss by an average of itself, a number, before or after it moves that."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.scale, self.first = 1.0, first

    def forward(self, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss, _ = terms(o, y)
        before, self.scale = self.scale, 0.9 * self.scale + 0.1 * loss.item()
        return loss / (self.scale if self.first else before)


def only_logged(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = terms(o, y)
    log.append({"loss": a.item(), "perplexity": math.exp(a.item()), "text": f"{b:.3f}"})
    return a + b


def of_the_batch(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (functional.cross_entropy(o, y, reduction="none") * y).sum() / y.sum().item()


class Inside(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net(), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), y)


def trained(loss: Loss, inside: bool, micro_batches: int, schedule: str) -> str:
    """How six steps differ from plain torch; empty if they do not."""
    own, model = copy.deepcopy((loss, Inside(loss) if inside else net()))
    truth = copy.deepcopy((own, model))
    rows = ROWS // micro_batches
    graph = capture_model(model, batches()[0], loss=None if inside else own)
    count = len(graph.layer_names)
    stages = Stage(range(1), (0,), (rows,)), Stage(range(1, count), (1,), (rows,))
    plan = Plan(stages, micro_batches, rows, schedule)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    optimizer, expected = make(truth[1].parameters()), list[float]()
    safety = Safety(transport="in-process", check_loss=False)
    # The first step's check would see some of it, and it cannot run where the loss keeps a number.
    with Pipeline(
        graph, batches()[0], plan=plan, optimizer=make, safety=safety, verify="off"
    ) as pipe:
        found = [pipe.step(batch).loss for batch in batches()[:6]]
    for x, y in batches()[:6]:
        expected.append(
            plain_step(optimizer, truth[1](x, y) if inside else truth[0](truth[1](x), y))
        )
    return "" if found == pytest.approx(expected, rel=1e-9) else f"{found} for {expected}"


TAKEN: dict[str, Loss] = {
    **{f.__name__: f for f in (balanced, added, weighed_by_tensor, by_list, by_numpy)},
    **{f.__name__: f for f in (by_threshold, hardest)},
    "scale that has moved": RunningScale(first=True),
    "scale that moves later": RunningScale(first=False),
}


@pytest.mark.parametrize(
    ("name", "inside"),
    # What a forward keeps, all stages write.
    [
        (name, inside)
        for name in TAKEN
        for inside in (False, True)
        if "scale" not in name or not inside
    ],
)
def test_one_micro_batch_takes_the_numbers_of_the_batch(name: str, inside: bool) -> None:
    assert not trained(TAKEN[name], inside, 1, "1f1b")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_several_micro_batches_are_refused(name: str, inside: bool) -> None:
    with pytest.raises(BadInput, match=r"loss over the whole batch .* does not work with") as found:
        trained(TAKEN[name], inside, 3, "1f1b")
    assert "test_numbers_of_the_loss.py" in str(found.value)
    assert "gpipe" in str(found.value)


@pytest.mark.parametrize("name", [name for name in TAKEN if "scale" not in name])
def test_a_loss_function_runs_once_on_the_whole_batch(name: str) -> None:
    assert not trained(TAKEN[name], False, 3, "gpipe")


@pytest.mark.parametrize("inside", [False, True])
def test_numbers_of_the_batch_alone_are_those_of_the_step(inside: bool) -> None:
    assert not trained(of_the_batch, inside, 3, "1f1b")


def test_numbers_that_are_only_logged_are_no_matter() -> None:
    assert not trained(only_logged, False, 3, "1f1b")


def test_several_batches_of_one_step_are_refused() -> None:
    graph = capture_model(Inside(balanced), batches()[0])
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (ROWS,)),), 1, ROWS, "gpipe")
    with (
        Pipeline(graph, batches()[0], plan=plan, verify="off") as pipe,
        pytest.raises(BadInput, match="the loss needs all samples of a step at once"),
    ):
        pipe.step(*batches()[:2])
