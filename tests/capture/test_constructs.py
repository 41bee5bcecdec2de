"""Stages of constructs that users write give the gradients of the user's own module, or refuse."""

import copy
from typing import Any

import pytest
import torch
from capture.construct_cases import CASES, Case, inputs
from capture.staged_runs import WAYS, StagedRun, gap

from penstock.capture.capture import capture_model
from penstock.errors import PenstockError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what the user's code does

ROWS = (5, 3)


def reference(case: Case, plain: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Gradients of the user's own module."""
    plain.zero_grad()
    if not case.apart:
        plain(x.clone(), y.clone()).backward()
        return
    start = 0
    for size in ROWS:
        own = x[start : start + size].clone(), y[start : start + size].clone()
        (plain(*own) * size / len(x)).backward()
        start += size


def run(case: Case, way: str, device: str = "cpu") -> list[float]:
    """The largest error of the gradients in each step."""
    torch.manual_seed(0)
    model = case.make().double().train().to(device)
    plain = copy.deepcopy(model)
    made = case.before or (lambda model, step: None)

    def before(model: Any, step: int) -> None:
        with torch.device(device):  # of the tensors and modules that it makes
            made(model, step)

    before(model, -1)
    before(plain, -1)
    x, y = (tensor.to(device) for tensor in inputs())
    own = StagedRun(
        model, (x.clone(), y.clone()), way=way, cuts=case.cuts, granularity="block", **case.options
    )
    worst: list[float] = []
    for step in range(case.steps):
        for each in (plain, *own.models):
            before(each, step)
        reference(case, plain, x, y)
        own.zero()
        own.step((x.clone(), y.clone()), ROWS, recompute=case.recompute)
        errors = [0.0]
        for name, parameter in plain.named_parameters():
            found = own.gradient(name)
            if parameter.grad is not None:
                wanted = parameter.grad
                errors.append(gap(torch.zeros_like(wanted) if found is None else found, wanted))
            elif found is not None:
                errors.append(float(found.abs().max()))
        worst.append(max(errors))
        if case.after is not None:
            for each in own.models:
                case.after(each, plain)
    return worst


def test_cuts_come_after_reentrant_checkpoints_too() -> None:
    layers = [
        capture_model(CASES[f"a {kind}checkpoint around each block"].make(), inputs()).layer_names
        for kind in ("", "reentrant ")
    ]
    assert layers[0] == layers[1]
    assert {"blocks.1.up", "blocks.2.up", "blocks.3.up"} < set(layers[1])


@pytest.mark.parametrize(
    "way", [way if way == "ranks" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
@pytest.mark.parametrize("name", CASES)
def test_stages_are_the_users_module(name: str, way: str) -> None:
    case = CASES[name]
    if case.outcome == "right":
        assert max(run(case, way)) < 1e-9
        return
    with pytest.raises(PenstockError, match=None if case.outcome == "refused" else case.outcome):
        run(case, way)
