"""One training of one method: its settings, its run, its result."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tasks import TASKS, Batch, Score, Task, stages_of

from penstock.capture.chain import Chain
from penstock.errors import LossNotFinite
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety, Update
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import StageCost
from penstock.train.job import OptimizerSettings
from penstock.train.optimizers import learning_rate_schedule, optimizer_factory

EVALUATIONS = 20
AVERAGED = 3
"""The number of last evaluations that make a run's final score."""

WARM_UP_SHARE = 0.05
FOLLOW_EVERY = 10
PER_STEP = 8
"""Updates to a step; the pipeline does not drain between steps."""

MEASURED = Path(__file__).with_name("measured_leads.json")
"""Seconds of every stage of every task, on one thread: the median of seven profiles."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A run: ``method`` is ``synchronous`` or the schedule that it follows.

    How far ahead `spectrain` predicts depends on the costs of the stages. By itself it is for
    backwards twice as long as forwards, as in a plan without costs; ``spectrain-published`` is for
    equally long ones, as in the paper, and ``spectrain-measured`` for those of `MEASURED`.
    """

    task: str
    optimizer: str
    method: str
    stages: int
    learning_rate: float
    seed: int
    updates: int


@dataclass(frozen=True, slots=True)
class Run:
    """The result; ``curve`` has (samples, held-out loss, accuracy) from the first on.

    ``errors[stage]`` is the root mean square of predicted and of stale weights against the weights
    that came, ``differences[stage]`` the mean number of updates between forward and backward, and
    ``copies[stage]`` the most copies of the weights at once. Empty where the method has none.
    """

    asked: Asked
    loss: float
    accuracy: float
    curve: tuple[tuple[int, float, float], ...]
    errors: tuple[tuple[float, float], ...] = ()
    differences: tuple[float, ...] = ()
    copies: tuple[int, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def train(asked: Asked) -> Run:
    """Train from the seed's model on the seed's batches; a diverged run scores as a guess."""
    torch.set_num_threads(1)
    task = TASKS[asked.task]
    modules = stages_of(task, asked.stages, asked.seed)
    plan = plan_of(asked, task)
    per_step = plan.global_batch // task.batch_size
    batches = task.train(1000 + asked.seed, task.batch_size)
    settings = OptimizerSettings(
        name=asked.optimizer,  # type: ignore[arg-type]
        learning_rate=asked.learning_rate,
        schedule="constant",
        warm_up_steps=round(WARM_UP_SHARE * asked.updates),
        momentum=0.95 if asked.optimizer == "muon" else 0.9,
    )
    pipe = Pipeline(
        Chain(modules, loss=task.loss),
        joined(islice(task.train(0, task.batch_size), per_step)),
        plan=plan,
        optimizer=optimizer_factory(settings),
        learning_rate_schedule=learning_rate_schedule(settings, asked.updates),
        update=Update(prediction_error_every=FOLLOW_EVERY if asked.method != "synchronous" else 0),
        device="cpu",
        safety=Safety(transport="in-process"),
        verify="off",
    )
    curve: list[tuple[int, float, float]] = []
    steps = asked.updates // per_step
    every = max(1, steps // EVALUATIONS)

    def fed() -> Iterator[Batch]:
        """The batches; scored are the weights after each, while micro-batches are in flight."""
        for step in range(1, steps + 1):
            yield joined(islice(batches, per_step))
            if step % every == 0:
                score = task.score(modules)
                if not isfinite(score.loss):
                    return
                curve.append((step * plan.global_batch, score.loss, score.accuracy))

    with suppress(LossNotFinite):
        deque(pipe.stream(fed()), maxlen=0)
    return result(asked, pipe, curve, diverged=pipe.steps < steps or len(curve) < steps // every)


def plan_of(asked: Asked, task: Task) -> Plan:
    """The pipeline of a method; every method sees ``task.batch_size`` samples an update."""
    costs: tuple[StageCost, ...] = ()
    match asked.method:
        case "synchronous":
            schedule, count, size = "gpipe", 1, task.batch_size
        case "2bw" | "xpipe":
            # A mini-batch of as many micro-batches as stages; a step of at least two of them,
            # so that the one after the flush of the plan is not the only one.
            schedule, count, size = asked.method, asked.stages, task.batch_size // asked.stages
        case "spectrain-published" | "spectrain-measured":
            schedule, count, size = "spectrain", PER_STEP, task.batch_size
            costs = (StageCost(1.0, 0.5, 0.5),) * asked.stages
            if asked.method == "spectrain-measured":
                costs = measured_costs(asked.task, asked.stages)
        case _:
            schedule, count, size = asked.method, PER_STEP, task.batch_size
    last = asked.stages - 1
    stages = (Stage(range(k, k + 1 + (k == last)), (k,), (size,)) for k in range(asked.stages))
    return Plan(tuple(stages), count, size, schedule, costs=costs)


def measured_costs(task: str, stages: int) -> tuple[StageCost, ...]:
    """Measured seconds of a forward and a backward of every stage."""
    found = json.loads(MEASURED.read_text())["tasks"][f"{task}/{stages}"]
    passes_s = zip(found["forward_s"], found["backward_s"], strict=True)
    return tuple(StageCost(forward_s, backward_s, 0.0) for forward_s, backward_s in passes_s)


def leads_of(asked: Asked) -> tuple[tuple[int, ...], ...]:
    """The updates by which each stage predicts ahead, for forwards and backwards; or none."""
    plan = plan_of(asked, TASKS[asked.task])
    rule = FAMILIES[plan.schedule].make(plan.shape()).weights
    return () if rule.prediction == "none" else (rule.forward_lead, rule.backward_lead)


def joined(batches: Iterator[Batch]) -> Batch:
    """Batches one behind the other as a longer one."""
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def result(
    asked: Asked, pipe: Pipeline, curve: list[tuple[int, float, float]], diverged: bool
) -> Run:
    """The final score, and what the stages measured."""
    final = [Score(loss, accuracy) for _, loss, accuracy in curve[-AVERAGED:]]
    if diverged:
        final = [Score(float("inf"), 0.0)]
    errors: list[tuple[float, float]] = []
    differences: list[float] = []
    for versions in pipe.weight_versions.values():
        followed = versions.log.errors
        errors.append(
            (
                fmean(e.predicted / sqrt(e.size) for e in followed) if followed else 0.0,
                fmean(e.stale / sqrt(e.size) for e in followed) if followed else 0.0,
            )
        )
        passes = list(versions.log.passes)
        steady = passes[len(passes) // 2 :]
        differences.append(fmean(p.difference for p in steady) if steady else 0.0)
    return Run(
        asked,
        fmean(score.loss for score in final),
        fmean(score.accuracy for score in final),
        tuple(curve),
        tuple(errors),
        tuple(differences),
        tuple(versions.most_copies for versions in pipe.weight_versions.values()),
    )
