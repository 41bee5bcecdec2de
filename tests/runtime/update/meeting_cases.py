"""What the workers of the tests of pipelines that meet run, and a plain loop of the same."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from refused import refusal_of
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from penstock.capture.chain import Chain
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety, Update

LAYERS, MICRO_BATCHES = 4, 2


@dataclass(frozen=True)
class MeetingCase:
    """Two stages with these slices of a micro-batch, and how their pipelines meet."""

    every: int
    steps: int
    rate: float = 1.0
    momentum: float = 0.0
    slices: tuple[int, ...] = (2, 2)
    adam: bool = False
    clip_norm: float | None = None
    transport: Any = "auto"

    @property
    def plan(self) -> Plan:
        """The plan: replica r of both stages is pipeline r."""
        replicas = len(self.slices)
        devices = tuple(range(replicas)), tuple(range(replicas, 2 * replicas))
        stages = [
            Stage(layers, own, self.slices)
            for layers, own in zip((range(2), range(2, LAYERS + 1)), devices, strict=True)
        ]
        return Plan(tuple(stages), MICRO_BATCHES, sum(self.slices), "1f1b")

    @property
    def update(self) -> Update:
        return Update(
            meet_every=self.every, outer_learning_rate=self.rate, outer_momentum=self.momentum
        )

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=0.02) if self.adam else SGD(parameters, lr=0.3)

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(number)
        rows = MICRO_BATCHES * sum(self.slices)
        made = torch.randn(2, rows, 5, generator=random, dtype=torch.float64)
        return made[0], made[1]

    def rows_of(self, pipeline: int) -> list[int]:
        """The rows of a batch that a pipeline computes: its slice of each micro-batch."""
        size, start = sum(self.slices), sum(self.slices[:pipeline])
        own = range(start, start + self.slices[pipeline])
        return [m * size + row for m in range(MICRO_BATCHES) for row in own]


def model_of() -> Chain:
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(LAYERS)]
    return Chain(layers, loss=nn.functional.mse_loss).double()


def pipeline_of(
    case: MeetingCase, *, model: Chain | None = None, plan: Plan | None = None, **more: Any
) -> Pipeline:
    given = {"update": case.update, "clip_norm": case.clip_norm, "timeout_s": 60, **more}
    given.setdefault("safety", Safety(transport=case.transport, compare_replicas_every=3))
    given["plan"] = plan or case.plan
    return Pipeline(model or model_of(), case.batch(0), optimizer=case.optimizer, **given)


ON_DEVICES = {
    "interleaved": (range(1), range(1, 2), range(2, 3), range(3, 5)),
    "zb-h1": (range(2), range(2, 5)),
}
"""The layers of stages that go around two groups of devices, under other schedules."""


def distances_under_other_schedules(case: MeetingCase) -> dict[str, float]:
    """How far the weights are from the plain loop's: by schedule, and with two batches a step.

    A rank that the plan does not use has no weights.
    """
    found: dict[str, float] = {}
    devices = [stage.devices for stage in case.plan.stages]
    for schedule, layers in ON_DEVICES.items():
        stages = tuple(
            Stage(own, devices[n % len(devices)], case.slices) for n, own in enumerate(layers)
        )
        plan = replace(case.plan, stages=stages, schedule=schedule)
        with pipeline_of(case, plan=plan) as pipe:
            for n in range(case.steps):
                pipe.step(case.batch(n))
            found[schedule] = distance(pipe, plain_loop(case)[0])
    with pipeline_of(case) as pipe:
        for n in range(case.steps):
            # The same rows twice have the gradient of once.
            pipe.step(case.batch(n), case.batch(n))
        found["accumulated"] = distance(pipe, plain_loop(case)[0])
    return found


def distance(pipe: Pipeline, models: Sequence[nn.Module]) -> float:
    expected = dict(models[pipe.rank % len(models)].named_parameters())
    weights = weights_of(pipe)
    return max(
        (float((w - expected[n].detach()).abs().max()) for n, w in weights.items()), default=0.0
    )


def refused_models(case: MeetingCase) -> list[str]:
    """What is said of batch norm, of tied stages, and of a parameter that is frozen later."""
    torch.manual_seed(1)
    layers = [nn.Linear(5, 5) for _ in range(LAYERS)]
    normed = [layers[0], nn.BatchNorm1d(5), *layers[2:]]
    tied = copy.deepcopy(layers)
    tied[3].weight = tied[0].weight
    models = [Chain(own, loss=nn.functional.mse_loss).double() for own in (normed, tied)]
    found = [refusal_of(pipeline_of, case, model=model) for model in models]
    with pipeline_of(case) as pipe:
        next(iter(pipe.parameters())).requires_grad_(False)
        return [*found, refusal_of(pipe.step, case.batch(0))]


def too_few_rows(case: MeetingCase) -> str:
    """What is said of a step on one sample; a whole batch trains afterwards."""
    with pipeline_of(case) as pipe:
        said = refusal_of(pipe.step, tuple(rows[:1] for rows in case.batch(0)))
        pipe.step(case.batch(0))
        return said


def weights_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


Trained = tuple[dict[str, torch.Tensor], list[tuple[float, float]], int]


def trained(cases: Sequence[MeetingCase]) -> dict[MeetingCase, Trained]:
    """This rank's weights after the steps, losses and norms, and how many copies differed."""
    found: dict[MeetingCase, Trained] = {}
    for case in cases:
        with pipeline_of(case) as pipe:
            metrics = [pipe.step(case.batch(n)) for n in range(case.steps)]
            assert pipe.verified is not None and pipe.verified.equal
            numbers = [(each.loss, each.gradient_norm) for each in metrics]
            found[case] = weights_of(pipe), numbers, pipe.steps
    return found


def plain_loop(case: MeetingCase) -> tuple[list[nn.Module], list[tuple[float, float]]]:
    """Copies of the module that train on their rows, and whose weights meet."""
    models: list[nn.Module] = [copy.deepcopy(model_of()) for _ in case.slices]
    optimizers = [case.optimizer(list(model.parameters())) for model in models]
    shares = [n / sum(case.slices) for n in case.slices]
    last = [p.detach().clone() for p in models[0].parameters()]
    speeds = [torch.zeros_like(p) for p in last]
    numbers: list[tuple[float, float]] = []
    for step in range(1, case.steps + 1):
        x, y = case.batch(step - 1)
        losses, norms = [], []
        for pipeline, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = case.rows_of(pipeline)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            most = float("inf") if case.clip_norm is None else case.clip_norm
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), most)))
            optimizer.step()
            losses.append(float(loss.detach()))
        numbers.append((sum(s * n for s, n in zip(shares, losses, strict=True)), max(norms)))
        if step % case.every == 0:
            meet(models, shares, last, speeds, case)
    return models, numbers


@torch.no_grad()
def meet(
    models: Sequence[nn.Module],
    shares: Sequence[float],
    last: list[torch.Tensor],
    speeds: list[torch.Tensor],
    case: MeetingCase,
) -> None:
    """Nesterov's momentum on the weights of the last meeting minus the mean of those now."""
    for place, same in enumerate(zip(*(m.parameters() for m in models), strict=True)):
        mean = sum((s * p for s, p in zip(shares, same, strict=True)), torch.zeros_like(same[0]))
        gradient = last[place] - mean
        speeds[place] = case.momentum * speeds[place] + gradient
        last[place] = last[place] - case.rate * (gradient + case.momentum * speeds[place])
        for parameter in same:
            parameter.copy_(last[place])


def resumed(folder: Path, case: MeetingCase, at: int) -> tuple[bool, bool]:
    """Whether a run that goes on from step ``at``, or from its state, ends with equal weights."""
    with pipeline_of(case, verify="off") as pipe:
        for n in range(at):
            pipe.step(case.batch(n))
        pipe.save(folder)
        state = copy.deepcopy(pipe.state_dict())
        for n in range(at, case.steps):
            pipe.step(case.batch(n))
        expected = weights_of(pipe)
        pipe.load_state_dict(state)
        for n in range(at, case.steps):
            pipe.step(case.batch(n))
        by_state = same(weights_of(pipe), expected)
    with pipeline_of(case, verify="off") as pipe:
        assert pipe.load(folder) == at
        for n in range(at, case.steps):
            pipe.step(case.batch(n))
        return by_state, same(weights_of(pipe), expected)


def skipped() -> tuple[str, bool]:
    """The place of NaN in the second pipeline's rows, and whether no weight changed for it."""
    case = MeetingCase(4, 1)
    update = replace(case.update, on_non_finite="skip")
    with pipeline_of(case, update=update, verify="off") as pipe:
        x, y = case.batch(0)
        x[case.rows_of(1)[1]] = torch.nan
        before = weights_of(pipe)
        metrics = pipe.step((x, y))
        assert metrics.skipped
        return metrics.non_finite, same(weights_of(pipe), before)


def written_by_two(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint between meetings; returns the first pipeline's weights, on its ranks."""
    case = MeetingCase(4, 3, 0.7, 0.9)
    with pipeline_of(case, verify="off") as pipe:
        for n in range(case.steps):
            pipe.step(case.batch(n))
        pipe.save(folder)
        return weights_of(pipe)


def loaded_by_one(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights that one pipeline loads, and its warnings."""
    plan = Plan((Stage(range(LAYERS + 1), (0,), (4,)),), MICRO_BATCHES, 4, "1f1b")
    case = MeetingCase(4, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Pipeline(model_of(), case.batch(0), plan=plan, optimizer=case.optimizer) as pipe:
            assert pipe.load(folder) == case.steps
            return weights_of(pipe), [str(each.message) for each in caught]


def loaded_with_an_outer_step(folder: Path) -> list[str]:
    """What is said of checkpoints of pipelines that take the mean, at a meeting and after it."""
    case = MeetingCase(2, 3)
    with pipeline_of(case, verify="off") as pipe:
        for n in range(case.steps):
            pipe.step(case.batch(n))
            pipe.save(folder, keep=3)
    found: list[str] = []
    for steps in (2, 3):
        with pipeline_of(replace(case, momentum=0.9), verify="off") as pipe:
            found.append(refusal_of(pipe.load, folder / f"step-{steps:08d}"))
            pipe.meet()
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def refusals(case: MeetingCase) -> list[str]:
    """What needs one model's weights between two meetings says, and then that all work."""
    with pipeline_of(case) as pipe:
        pipe.step(case.batch(0))
        found = [
            refusal_of(pipe.model_state_dict),
            refusal_of(pipe.verify, case.batch(1)),
        ]
        pipe.meet()
        pipe.model_state_dict()
        assert pipe.verify(case.batch(1)).equal
        return found
