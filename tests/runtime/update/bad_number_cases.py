"""What the worker processes of the tests of NaN and infinity run.

The first value of every row is a flag, which each layer passes on. A row whose flag is `FORWARD`
makes one layer divide by zero. One whose flag is `BACKWARD` makes another take the root of zero,
whose gradient is infinite.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from refused import refusal_of
from runtime.pipeline_cases import plan_of
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.errors import PenstockError
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.options import Update

WIDTH, ROWS, MICRO_BATCHES, LAYERS = 6, 4, 3, 7
FORWARD, BACKWARD, PLAIN = 7.0, 9.0, 0.5
BAD_ROW = 2 * ROWS + 3
"""A row of the last micro-batch; with replicas of 3 rows and 1 it is the second replica's."""


class Block(nn.Module):
    """A linear layer with batch normalisation, beside the flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH - 1, WIDTH - 1)
        self.norm = nn.BatchNorm1d(WIDTH - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The flag, and the layer's output."""
        return torch.cat([x[:, :1], torch.tanh(self.norm(self.linear(x[:, 1:])))], 1)


class Fragile(Block):
    """The same, with a division that fails at one flag and a root that fails at another.

    ``fails`` chooses which of the two this layer has.
    """

    def __init__(self, fails: float) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The flag, and the layer's output."""
        flag, values = x[:, :1], x[:, 1:]
        if self.fails == FORWARD:
            return torch.cat([flag, self.linear(values) / (flag - FORWARD)], 1)
        root = torch.sqrt(self.linear(values) * 0 + (flag - BACKWARD).abs())
        return torch.cat([flag, values + root], 1)


@dataclass(frozen=True)
class BadCase:
    """A pipeline of groups with these numbers of replicas, and the fault of its third step.

    ``fault`` is the flag of a row of that step's batch, or "weight", or "batch", or "nothing".
    """

    fault: float | str
    replicas: tuple[int, ...] = (1, 1)
    schedule: str = "1f1b"
    traced: bool = False
    recompute: bool = False
    autocast: torch.dtype | None = None
    policy: str = "stop"
    batches: int = 1


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        Block(), Fragile(FORWARD), Block(), Block(), Fragile(BACKWARD), Block(), Block()
    )


def batch_of(step: int, fault: float | str = "nothing") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS * MICRO_BATCHES, WIDTH, generator=generator)
    x[:, 0] = PLAIN
    if isinstance(fault, float):
        x[BAD_ROW, 0] = fault
    if fault == "batch":
        x[BAD_ROW, 2] = torch.nan
    return x, torch.randn(ROWS * MICRO_BATCHES, WIDTH, generator=generator)


def pipeline(case: BadCase) -> Pipeline:
    model: Any = model_of()
    plan = plan_of(LAYERS + 1, case.replicas, case.schedule, recompute=case.recompute)
    if case.traced:
        model = capture_model(model, batch_of(0), loss=functional.mse_loss)
        plan = plan_of(len(model.layer_names), case.replicas, case.schedule)
        plan = replace(
            plan, stages=tuple(replace(s, recompute=case.recompute) for s in plan.stages)
        )
    else:
        model = Chain(list(model), loss=functional.mse_loss)
    return Pipeline(
        model,
        batch_of(0),
        plan=plan,
        optimizer=lambda p: SGD(p, lr=0.01, momentum=0.9),
        autocast=case.autocast,
        update=Update(on_non_finite=case.policy),  # type: ignore[arg-type]
        timeout_s=60,
    )


def message_of(case: BadCase) -> str:
    """The message of the third step, on this rank; then a step on a good batch must be possible."""
    with pipeline(case) as pipe:
        for step in (1, 2):
            pipe.step(*[batch_of(step)] * case.batches)
        if case.fault == "weight":
            name = "4.linear.weight"
            for own, parameter in pipe.named_parameters():
                if own == name:
                    with torch.no_grad():
                        parameter[1, 2] = torch.nan
        batches = [batch_of(step) for step in range(3, 2 + case.batches)]
        fault = batch_of(3, case.fault)
        try:
            pipe.step(*batches, fault)
        except PenstockError as failure:
            if case.fault != "weight":
                assert pipe.step(batch_of(5)).step == 3
            return f"{type(failure).__name__}: {failure}"
    return "nothing"


def messages(cases: Sequence[BadCase]) -> dict[BadCase, str]:
    """The messages of all cases on this rank."""
    return {case: message_of(case) for case in cases}


def everything(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in pipe.state_dict().items() if isinstance(t, torch.Tensor)}


def run(case: BadCase, steps: Sequence[int], bad: Sequence[int]) -> tuple[list[StepMetrics], Any]:
    """Metrics of these steps, of which some have the case's fault, and all tensors afterwards."""
    with pipeline(case) as pipe:
        batches = [batch_of(step, case.fault if step in bad else "nothing") for step in steps]
        found = list(pipe.stream(batches))
        return found, everything(pipe)


def left_out(case: BadCase) -> dict[str, Any]:
    """A run that leaves out two of six steps, and one that never had them."""
    steps, bad = range(1, 7), (3, 4)
    found, ours = run(case, steps, bad)
    _, plain = run(replace(case, fault="nothing"), [s for s in steps if s not in bad], ())
    return {
        "different": [n for n in plain if not torch.equal(plain[n], ours[n])],
        "skipped": [m.step for m in found if m.skipped],
        "steps": [m.step for m in found],
        "where": next(m.non_finite for m in found if m.skipped),
    }


def all_left_out(cases: Sequence[BadCase]) -> dict[BadCase, dict[str, Any]]:
    return {case: left_out(case) for case in cases}


def never_ending(case: BadCase) -> tuple[int, str]:
    """The number of steps, and the message of a run of bad batches only."""
    with pipeline(case) as pipe:
        try:
            for step in range(1, 100):
                pipe.step(batch_of(step, case.fault))
        except PenstockError as failure:
            return pipe.steps, str(failure)
    return 0, "nothing"


def sums_of_replicas() -> str:
    """The message where every rank's gradients are finite, but not their sum."""
    with pipeline(BadCase("nothing", (2,))) as pipe:
        pipe.step(batch_of(1))
        bucket = pipe._engine.buckets.shared[0]
        before = bucket.sum
        assert before is not None and dist.is_initialized()
        settle = before.settle
        before.settle = lambda: (settle(), bucket.flat[:1].fill_(torch.inf), None)[-1]  # type: ignore[method-assign]
        return refusal_of(pipe.step, batch_of(2))
