"""Programs drawn from a grammar, which change at random steps: ten steps are right, or refused.

The loss is a sum of terms, each with a weight and a reduction, that begin, end and turn from a mean
to a sum; an expert rests in some steps, and a buffer is written in place, assigned, or not there.
"""

import copy
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from plain_training import plain_step
from runtime.pipeline_cases import plan_of
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import PenstockError
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline

STEPS, ROWS, WIDTH, CLASSES = 10, 6, 5, 3
NEAR = 1e-9
NOW = SimpleNamespace(step=0)


@dataclass(frozen=True)
class Term:
    """A term of a loss from step ``first`` to ``last``; from step ``turns`` reduced otherwise."""

    of: str
    weight: float
    sums: bool
    first: int
    last: int
    turns: int

    def value(self, scores: torch.Tensor, hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Its value in this step."""
        reduction = "sum" if self.sums != (NOW.step >= self.turns) else "mean"
        if self.of == "classes":
            return functional.cross_entropy(scores, y, reduction=reduction)
        if self.of == "distance":
            return functional.mse_loss(scores, functional.one_hot(y, CLASSES), reduction=reduction)
        rows = hidden.square().mean(-1) if self.of == "size" else hidden.abs().sum(-1)
        return rows.sum() if reduction == "sum" else rows.mean()


@dataclass(frozen=True)
class Program:
    """What is drawn: the user's program, and how it is trained."""

    terms: tuple[Term, ...]
    scaled: str
    rests: frozenset[int]
    state: str
    micro_batches: int
    schedule: str

    def loss(self, outputs: Any, y: torch.Tensor) -> torch.Tensor:
        """The loss of a step."""
        scores, hidden = outputs
        loss = functional.cross_entropy(scores, y)
        for term in self.terms:
            if term.first <= NOW.step < term.last:
                loss = loss + term.weight * term.value(scores, hidden, y)
        if self.scaled == "by a number":
            loss = loss * (1.0 + 0.1 * NOW.step)
        if self.scaled == "by itself":
            loss = loss / loss.item()
        return loss


class Expert(nn.Module):
    """Adds to what it is given, but not in steps in which it rests."""

    def __init__(self, rests: frozenset[int]) -> None:
        super().__init__()
        self.own, self.rests = nn.Parameter(torch.eye(WIDTH)), rests

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if NOW.step in self.rests else x + x @ self.own


class Net(nn.Module):
    """A body with an expert, of which what comes out of its first layer may be added up."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expert, self.head = Expert(program.rests), nn.Linear(WIDTH, CLASSES)
        self.state = program.state
        if self.state:
            self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        if self.state == "in place":
            self.seen += x.detach().sum(0)
        elif self.state == "assigned":
            self.seen = self.seen + x.detach().sum(0)
        hidden = torch.tanh(self.second(self.expert(x)))
        return self.head(hidden), hidden


TERMS = st.builds(
    Term,
    of=st.sampled_from(["classes", "distance", "size", "sparsity"]),
    weight=st.sampled_from([0.5, 0.01]),
    sums=st.booleans(),
    first=st.integers(0, STEPS - 1),
    last=st.integers(1, STEPS + 3),
    turns=st.sampled_from([STEPS] * 3 + [2, 5]),
)
PROGRAMS = st.builds(
    Program,
    terms=st.lists(TERMS, max_size=3).map(tuple),
    scaled=st.sampled_from([""] * 4 + ["by a number", "by itself"]),
    rests=st.sampled_from([(), (), (3,), (1, 2, 6)]).map(frozenset),
    state=st.sampled_from(["", "", "", "in place", "assigned"]),
    micro_batches=st.sampled_from([1, 2, 3]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def outcome(program: Program) -> str:
    """ "right", or with which error it is refused; an `AssertionError` where a step is wrong."""
    NOW.step = 0
    torch.manual_seed(0)
    model = Net(program).double()
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, WIDTH, generator=draw, dtype=torch.float64)
    y = torch.randint(CLASSES, (STEPS, ROWS), generator=draw)
    try:
        example = x[0], y[0]
        graph = capture_model(model, example, loss=program.loss)
        sizes = {"micro_batches": program.micro_batches, "rows": ROWS // program.micro_batches}
        plan = plan_of(len(graph.layer_names), (1, 1), program.schedule, **sizes)
        safety = Safety(transport="in-process")
        with Pipeline(graph, example, plan=plan, optimizer=sgd, safety=safety) as pipe:
            pipe.print_with(lambda line: None)
            for NOW.step in range(STEPS):
                found = pipe.step((x[NOW.step], y[NOW.step])).loss
                loss = plain_step(optimizer, program.loss(plain(x[NOW.step]), y[NOW.step]))
                assert found == pytest.approx(loss, rel=NEAR), f"step {NOW.step}"
            ours = pipe.model_state_dict()
    except PenstockError as refusal:
        assert "\n" not in str(refusal)
        return type(refusal).__name__
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-8, atol=1e-10, msg=name)
    return "right"


@pytest.mark.timeout(1200)
def test_ten_steps_of_a_drawn_program_are_right_or_refused() -> None:
    """And most are right, or that would show little."""
    found = Counter[str]()

    @settings(max_examples=100, deadline=None)
    @given(PROGRAMS)
    def draw(program: Program) -> None:
        found[outcome(program)] += 1

    draw()
    assert found["right"] > found.total() / 2, found


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=5000, deadline=None)
@given(PROGRAMS)
def test_ten_steps_of_thousands_are(program: Program) -> None:
    event(outcome(program))
