"""Programs whose loss changes while training goes on, and what the ranks that train them run."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from runtime import pipeline_cases
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import PenstockError
from penstock.plan.plan import Plan

STEPS = 8
NEAR = 1e-9
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two heads on one body; with ``own``, a function of it and the batch, it returns its loss."""

    def __init__(self, own: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 8)
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 2)
        self.own = own

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        early = torch.tanh(self.first(x))
        hidden = torch.tanh(self.third(torch.tanh(self.second(early))))
        outputs = self.a(hidden), self.b(hidden)
        return outputs if self.own is None else self.own(outputs, y, early, self.training)


@dataclass
class Case:
    """A loss that reads ``now.step``, and how many kinds of batches its steps are."""

    loss: Callable[..., torch.Tensor]
    kinds: int = 2
    in_model: bool = False
    change: Callable[[int], None] = lambda step: None
    now: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(step=0))


def batches(steps: int = STEPS) -> list[Batch]:
    """Unequal numbers of targets, and in some steps one row of class 3, which the first lacks."""
    draw = torch.Generator().manual_seed(5)
    found: list[Batch] = []
    for step in range(steps):
        rows = 8 - step % 3
        y = torch.randint(3, (rows,), generator=draw)
        y[1 + step % 2 :: 3] = -100
        if step % 3 == 2:
            y[0] = 3
        found.append((torch.randn(rows, 6, generator=draw, dtype=torch.float64), y))
    return found


def entropy(outputs: Any, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs[0], y, **options)


def cases() -> dict[str, Case]:
    now = SimpleNamespace(step=0)

    said: list[float] = []

    def later() -> bool:
        return now.step >= 3

    def term(o: Any, y: torch.Tensor) -> torch.Tensor:
        loss = entropy(o, y) + 0.1 * o[1].square().sum() / len(y)
        return loss + 0.3 * o[0].abs().mean() if later() else loss

    def left_out(o: Any, y: torch.Tensor) -> torch.Tensor:
        loss = entropy(o, y) + 0.1 * o[1].square().mean()
        return loss if 2 <= now.step < 5 else loss + 0.3 * o[0].abs().mean()

    def alternating(o: Any, y: torch.Tensor) -> torch.Tensor:
        loss = o[1].square().mean() + o[0].square().mean()
        return loss + o[0].exp().sum() if now.step % 2 else loss

    def becomes_sum(o: Any, y: torch.Tensor) -> torch.Tensor:
        return entropy(o, y, reduction="sum" if later() else "mean") + o[1].square().mean()

    def another(o: Any, y: torch.Tensor) -> torch.Tensor:
        apart = functional.l1_loss if later() else functional.mse_loss
        return apart(o[1], torch.ones_like(o[1])) + entropy(o, y)

    def masked(o: Any, y: torch.Tensor, *, first: bool) -> torch.Tensor:
        each = o[1].square().sum(1)
        if first != later():
            keep = (y >= 0).double()
            return (each * keep).sum() / keep.sum()
        return each.mean()

    def rare(o: Any, y: torch.Tensor) -> torch.Tensor:
        loss = entropy(o, y)
        if (y == 3).any():
            loss = loss + 0.3 * o[1][y == 3].square().sum()
        return loss

    def stacked(o: Any, y: torch.Tensor) -> torch.Tensor:
        terms = [entropy(o, y), o[1].square().mean()]
        terms += [o[0].square().mean()] * later()
        return torch.stack(terms).mean()

    def over_rows(o: Any, y: torch.Tensor) -> torch.Tensor:
        return o[1].square().sum(0 if later() else 1).sum() + entropy(o, y)

    def values(o: Any, y: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor([1.0, 2.0, 0.5, 1.0 + now.step], dtype=torch.float64)
        smoothing = 0.02 * now.step
        first = entropy(o, y, weight=weight if later() else None, label_smoothing=smoothing)
        ones = torch.ones_like(o[1])
        second = functional.binary_cross_entropy_with_logits(
            o[1], ones, pos_weight=torch.tensor(1.0 + now.step, dtype=torch.float64)
        )
        return first + 0.1 * now.step * second

    def logged(o: Any, y: torch.Tensor) -> torch.Tensor:
        if now.step % 2 == 0:
            said.append((o[0].argmax(1) == y).double().mean().item() + o[1].abs().mean().item())
        return entropy(o, y) + o[1].square().mean()

    def numbered(o: Any, y: torch.Tensor) -> torch.Tensor:
        loss = o[0].square().mean()
        for _ in range(now.step):
            loss = loss + o[1].square().sum()
        return loss

    module = nn.CrossEntropyLoss()

    def of_module(o: Any, y: torch.Tensor) -> torch.Tensor:
        return module(o[0], y) + o[1].square().mean()

    def change_module(step: int) -> None:
        module.reduction = "sum" if step >= 3 else "mean"

    def model_term(o: Any, y: torch.Tensor, early: torch.Tensor, training: bool) -> torch.Tensor:
        loss = entropy(o, y)
        return loss + 0.1 * early.square().sum() if later() else loss

    def model_rare(o: Any, y: torch.Tensor, early: torch.Tensor, training: bool) -> torch.Tensor:
        loss = rare(o, y)
        return loss + 0.2 * early.abs().mean() if training else loss

    found = {
        "a term is switched on": Case(term),
        "a term is left out, and comes back": Case(left_out),
        "a term in every second step": Case(alternating),
        "the mean becomes a sum": Case(becomes_sum),
        "the module's mean becomes a sum": Case(of_module, change=change_module),
        "another function": Case(another),
        "masked first, then plain": Case(lambda o, y: masked(o, y, first=True)),
        "plain first, then masked": Case(lambda o, y: masked(o, y, first=False)),
        "a rare term of one row": Case(rare),
        "more terms in a list": Case(stacked),
        "a sum over the other dimension": Case(over_rows),
        "values alone change": Case(values, kinds=1),
        "a number is printed at times": Case(logged, kinds=1),
        "a term more in every step": Case(numbered, kinds=STEPS),
        "a term of early activations, in the model": Case(model_term, in_model=True),
        "a rare term, in the model": Case(model_rare, in_model=True),
    }
    for case in found.values():
        case.now = now
    return found


def net(case: Case) -> Net:
    torch.manual_seed(0)
    return Net(case.loss if case.in_model else None).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def plain_loss(model: Net, case: Case, batch: Batch) -> torch.Tensor:
    x, y = batch
    return model(x, y) if case.in_model else case.loss(model(x), y)


def pipeline(case: Case, model: nn.Module, plan: Plan, **options: Any) -> Pipeline:
    """A pipeline of a case as it is in the first step."""
    case.now.step = 0
    case.change(0)
    example = batches(1)[0]
    graph = capture_model(model, example, loss=None if case.in_model else case.loss)
    return Pipeline(graph, example, plan=plan, optimizer=sgd, **options)


plan_of = partial(pipeline_cases.plan_of, 6, micro_batches=2, rows=4)
"""Of the six layers of `Net`."""


def differences(
    name: str, plan: Plan, *, kinds: int | None = None, **options: Any
) -> Iterator[str]:
    """How steps and evaluations differ from plain torch; and other numbers of kinds."""
    case = cases()[name]
    model = net(case)
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    with pipeline(case, model, plan, **options) as pipe:
        for step, batch in enumerate(batches()):
            case.now.step = step
            case.change(step)
            reference.eval()
            expected = plain_loss(reference, case, batch).item()
            reference.train()
            yield from off(f"evaluation {step}", pipe.evaluate(batch).loss, expected)
            loss = plain_step(optimizer, plain_loss(reference, case, batch))
            yield from off(f"loss of step {step}", pipe.step(batch).loss, loss)
        for own, parameter in pipe.named_parameters():
            yield from off(own, parameter, reference.get_parameter(own))
        count = len(pipe._engine.kinds.graphs)
        if count != (case.kinds if kinds is None else kinds):
            yield f"{count} kinds of batches"


def off(what: str, found: object, expected: object) -> list[str]:
    try:
        torch.testing.assert_close(found, expected, rtol=NEAR, atol=NEAR)
    except AssertionError as problem:
        return [f"{what}: {str(problem).splitlines()[-3:]}"]
    return []


def run_cases(names: Sequence[str], plan: Plan) -> list[str]:
    """What differs on this rank."""
    dist.init_process_group("gloo")
    found: list[str] = []
    for name in names:
        try:
            found += [f"{name}: {line}" for line in differences(name, plan)]
        except PenstockError as problem:
            found.append(f"{name}: {type(problem).__name__}: {problem}")
    dist.destroy_process_group()
    return found


def run_refused(plan: Plan) -> str:
    """How a branch of the loss is refused that activations decide about."""
    dist.init_process_group("gloo")
    now = SimpleNamespace(step=0)

    def by_activations(o: Any, y: torch.Tensor) -> torch.Tensor:
        loss = o[1].square().mean()
        if now.step and (o[0] > -100).all():
            loss = loss + o[0].square().sum()
        return loss

    case = Case(by_activations, now=now)
    with pipeline(case, net(case), plan) as pipe:
        try:
            for now.step, batch in enumerate(batches()):
                pipe.step(batch)
        except PenstockError as problem:
            return str(problem)
        finally:
            dist.destroy_process_group()
    return "trained"
