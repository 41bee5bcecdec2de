"""What the worker processes of the tests of overlapping iterations run.

Every rank trains twice, on the same batches from the same weights: step by step, and as a stream
whose steps are checked afterwards. All that a step changes must be the same to the bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from penstock.capture.chain import Chain
from penstock.errors import LossNotFinite
from penstock.plan.plan import Plan, Stage
from penstock.plan.row_split import split_rows
from penstock.runtime.gradients.loss_scaling import LossScaling
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.settings import Safety, Update
from penstock.runtime.steps.overlapped import OverlappedSteps
from penstock.runtime.transport.transport import TransportChoice
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import placement_of_style

LAYERS, WIDTH, CLASSES, ROWS, BATCHES = 9, 8, 5, 3, 8

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.2),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: AdamW(p, lr=0.02, weight_decay=0.1),
    "fused": lambda p: AdamW(p, lr=0.02, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
}


@dataclass(frozen=True)
class Case:
    """A pipeline of groups with these numbers of replicas, and how it is trained.

    ``clip`` says where the clipping norm lies among those of the steps: below it are so many of
    all steps (1: nothing is clipped). ``bad`` is the batch with a number that is not finite.
    """

    schedule: str
    replicas: tuple[int, ...]
    optimizer: str = "adamw"
    micro_batches: int = 4
    clip: float = 1.0
    bad: int = -1
    noisy: bool = False
    recompute: bool = False
    half: bool = False
    transport: TransportChoice = "auto"

    def plan(self) -> Plan:
        """Stages of unequal numbers of layers."""
        style = FAMILIES[self.schedule].placement
        rounds = 2 if style in ("looped", "folded") else 1
        placement = placement_of_style(style, len(self.replicas), rounds)
        count = len(placement)
        bounds = [0, *(1 + (LAYERS - 1) * i // count for i in range(1, count)), LAYERS + 1]
        starts = list(accumulate(self.replicas, initial=0))
        groups = [tuple(range(lo, hi)) for lo, hi in pairwise(starts)]
        stages = tuple(
            Stage(
                range(lo, hi),
                groups[group],
                split_rows(ROWS, (2, 1) if self.replicas[group] == 2 else (1,)),
                self.recompute,
            )
            for (lo, hi), group in zip(pairwise(bounds), placement, strict=True)
        )
        return Plan(stages, self.micro_batches, ROWS, self.schedule)


def model_of(case: Case) -> Chain:
    """A chain in float64 with batch normalisation and dropout where it is to be noisy."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        if case.noisy:
            parts[1:1] = [nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)]
        layers.append(nn.Sequential(*parts))
    layers.append(nn.Linear(WIDTH, CLASSES))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target)

    chain = Chain(layers, loss=loss)
    return chain if case.half else chain.double()


def batches_of(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches whose gradients differ in size; some of their targets count nothing."""
    generator = torch.Generator().manual_seed(2)
    rows, dtype = ROWS * case.micro_batches, torch.float32 if case.half else torch.float64
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(BATCHES):
        inputs = torch.randn(rows, WIDTH, generator=generator, dtype=dtype)
        targets = torch.randint(0, CLASSES, (rows,), generator=generator)
        targets[number % 3 :: 4] = -100
        if number == case.bad:
            inputs[0, 0] = torch.inf
        found.append((inputs * (3.0 if number % 3 == 1 else 0.5), targets))
    return found


def pipeline(case: Case, clip_norm: float | None, *, sync: Any = "before") -> Pipeline:
    """The case's pipeline, from its first weights."""
    scaling = LossScaling(initial=2.0**18, growth_interval=2) if case.half else None
    return Pipeline(
        model_of(case),
        case.plan(),
        batches_of(replace(case, bad=-1))[0],
        optimizer=OPTIMIZERS[case.optimizer],
        learning_rate_schedule=lambda optimizer: LambdaLR(optimizer, lambda n: 1 / (1 + n)),
        clip_norm=clip_norm,
        autocast=torch.float16 if case.half else None,
        update=Update(loss_scaling=scaling, optimizer_sync=sync),
        safety=Safety(transport=case.transport),
        timeout_s=60,
        verify="off",
    )


def step_by_step(pipe: Pipeline, batches: Sequence[Any]) -> Iterator[StepMetrics]:
    """A step for each batch; none for one whose loss is not finite."""
    for batch in batches:
        try:
            yield pipe.step(batch)
        except LossNotFinite:
            continue


def streamed(pipe: Pipeline, batches: Sequence[Any]) -> Iterator[StepMetrics]:
    """The same as streams: the batch behind one whose loss is not finite is given again."""
    left = list(batches)
    while left:
        try:
            for metrics in pipe.stream(list(left)):
                left.pop(0)
                yield metrics
        except LossNotFinite:
            left.pop(0)


def everything(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """All tensors of a rank's training: weights, buffers, optimizer's state, random numbers."""
    return {n: t.clone() for n, t in pipe.state_dict().items() if isinstance(t, torch.Tensor)}


def numbers(metrics: StepMetrics) -> tuple[Any, ...]:
    """What a step tells, but for times."""
    return replace(metrics, seconds=0.0, bubble=0.0), repr(metrics.loss)


def compare(cases: Sequence[Case]) -> dict[Case, tuple[list[str], int]]:
    """What differs on this rank, and how many steps were undone, by case."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return {case: compare_one(case) for case in cases}


def compare_one(case: Case) -> tuple[list[str], int]:
    """See `compare`."""
    batches, clip_norm = batches_of(case), None
    if case.clip < 1:
        with pipeline(case, 1e9) as pipe:
            norms = sorted(m.gradient_norm for m in step_by_step(pipe, batches))
        clip_norm = norms[int(case.clip * len(norms))]
    with pipeline(case, clip_norm) as pipe:
        plain = [numbers(metrics) for metrics in step_by_step(pipe, batches)]
        expected, state = everything(pipe), pipe.state_dict()["state"]
        gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    with pipeline(case, clip_norm, sync="after") as pipe:
        ours = [numbers(metrics) for metrics in streamed(pipe, batches)]
        found, other = everything(pipe), pipe.state_dict()["state"]
        assert isinstance(pipe._steps, OverlappedSteps)
        undone = pipe._steps.undone
        wrong = [
            f"gradient of {n}"
            for n, p in pipe.named_parameters()
            # A step that is not taken leaves what no one uses.
            if p.grad is not None and not ours[-1][0].skipped and case.bad != BATCHES - 1
            if not torch.equal(p.grad, gradients[n])
        ]
    pairs = enumerate(zip(ours, plain, strict=False))
    wrong += [f"step {n}: {ours} not {plain}" for n, (ours, plain) in pairs if ours != plain]
    wrong += [n for n in expected if not torch.equal(expected[n], found[n])]
    if len(ours) != len(plain) or expected.keys() != found.keys() or state != other:
        wrong.append(f"{len(ours)} and {len(plain)} steps, or other states")
    return wrong, undone
