"""The loss of some steps is compared with the user's own code, run once on the whole step."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from runtime.loss_check_cases import ROWS, batches, net, run_checked, without_path
from torch import nn
from torch.nn import functional

from penstock import Pipeline, Plan, RunFailed, Safety, Stage, capture_model
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.verify import loss_check

now = {"step": 0}


def term_later(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(o, y) + 0.1 * o.square().sum() / len(o)
    return loss + 0.3 * o.abs().mean() if now["step"] >= 4 else loss


def reduction_later(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(o, y, reduction="sum" if now["step"] >= 4 else "mean")


def masked(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    counted = y > 0
    return (functional.cross_entropy(o, y, reduction="none") * counted).sum() / counted.sum()


def overwritten(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(o.div_(2.0), y)


def drawing(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.dropout(o, 0.1), y)


class Inside(nn.Module):
    """Gives its loss, of two heads on one hidden tensor; ``kept`` counts its calls."""

    def __init__(self, loss: Callable[..., torch.Tensor], counts: bool = False) -> None:
        super().__init__()
        self.net, self.other, self.loss = net(), nn.Linear(4, 2).double(), loss
        self.calls = 0 if counts else None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        o = self.net(x)
        if self.calls is not None:
            self.calls += 1
        return {"loss": self.loss(o, y) + 0.1 * self.other(o).square().mean(), "scores": o}


def trained(
    model: nn.Module, loss: Any, monkeypatch: pytest.MonkeyPatch, stages: int = 2, **options: Any
) -> tuple[list[int], list[str], list[float]]:
    """Train eight steps: which were compared, what was said, and the losses."""
    compared, said, losses = [], [], []
    whole = loss_check.LossCheck._loss

    def seen(self: Any, kept: Any, samples: int, loss: float) -> Any:
        found = whole(self, kept, samples, loss)
        if found[1]:
            compared.append(now["step"] + 1)
            assert found[0] == pytest.approx(loss, rel=1e-12) or now["step"] >= 4
        return found

    monkeypatch.setattr(loss_check.LossCheck, "_loss", seen)
    monkeypatch.setitem(now, "step", 0)
    batch = batches()[0]
    graph = capture_model(model, batch, loss=loss)
    if options.get("unguarded"):
        graph = without_path(graph)
    count = len(graph.layer_names)
    cuts = [0, 1, count] if stages == 2 else [0, count]
    parts = pairwise(cuts)
    options = {"recompute": False, **options}
    plan = Plan(
        tuple(
            Stage(range(lo, hi), (k,), (ROWS // 4,), recompute=options["recompute"])
            for k, (lo, hi) in enumerate(parts)
        ),
        4,
        ROWS // 4,
        options.get("schedule", "1f1b"),
    )
    safety = Safety(transport="in-process", check_loss=options.get("check_loss", True))
    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    with Pipeline(graph, batch, plan=plan, optimizer=make, safety=safety) as pipe:
        pipe.print_with(said.append)
        for step, one in enumerate(batches()):
            now["step"] = step
            losses.append(pipe.step(one).loss)
    return compared, [line for line in said if "step 1:" not in line], losses


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (net, functional.cross_entropy),
        (net, masked),
        (net, overwritten),
        (lambda: Inside(masked), None),
    ],
)
def test_the_steps_of_powers_of_two_are_compared(
    model: Any, loss: Any, recompute: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(model(), loss, monkeypatch, stages, recompute=recompute)
    assert found[:2] == ([1, 2, 4, 8], [])


@pytest.mark.parametrize("loss", [term_later, reduction_later])
@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_that_changes_later_is_refused(
    loss: Any, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Inside(loss) if inside else net()
    before = copy.deepcopy(model)
    with pytest.raises(RunFailed, match=r"step 8 was not taken: its loss is .* loss code"):
        trained(model, None if inside else loss, monkeypatch, unguarded=True)
    assert trained(before, None if inside else loss, monkeypatch, check_loss=False)[0] == []


@pytest.mark.parametrize(
    ("model", "loss", "why"),
    [
        (net, drawing, "random numbers are drawn (test_loss_check.py"),
        (lambda: Inside(masked, counts=True), None, "forward changes 'calls' every time"),
    ],
)
def test_what_cannot_run_again_is_told_once(
    model: Any, loss: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, said, _ = trained(model(), loss, monkeypatch)
    told = [line for line in said if line.startswith("losses of later steps are not compared")]
    assert compared == []
    assert len(told) == 1
    assert why in told[0]


def test_replicas_of_the_last_stage_join_their_outputs() -> None:
    plan = Plan((Stage(range(1), (0,), (6,)), Stage(range(1, 3), (1, 2), (4, 2))), 2, 6, "1f1b")
    for compared, refused in launch_workers(run_checked, (plan,), workers=3, threads=1):
        assert compared
        assert "step 4 was not taken: its loss is" in refused


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("after_capture", [False, True])
def test_hooks_are_not_called_once_more(
    after_capture: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(check_loss: bool) -> tuple[int, list[str]]:
        model, seen = net(), list[object]()
        if not after_capture:
            model[0].register_forward_hook(lambda *_: seen.append(0))
        capture = capture_model

        def captured(*given: Any, **options: Any) -> Any:
            graph = capture(*given, **options)
            if after_capture:
                model[0].register_forward_hook(lambda *_: seen.append(0))
            seen.clear()
            return graph

        with monkeypatch.context() as within:
            within.setattr(f"{__name__}.capture_model", captured)
            said = trained(model, functional.cross_entropy, within, stages, check_loss=check_loss)[
                1
            ]
        return len(seen), said

    plain, with_check = calls(check_loss=False), calls(check_loss=True)
    assert plain[0] == with_check[0] > 0
    assert [line.rpartition(": ")[2] for line in with_check[1]] == [
        "the forward hooks of module '0' would run once more"
    ]
