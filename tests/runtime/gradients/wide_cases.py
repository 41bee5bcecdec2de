"""What the worker processes of the tests of gradients in float32 run, of bfloat16 weights.

Every rank computes the sums itself: a plain loop adds each micro-batch's gradients in float32.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import join
from torch import nn
from torch.optim import SGD

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Update
from penstock.runtime.tables import Constraints

WIDTH, ROWS, STEPS, LAYERS, RATE = 16, 4, 3, 4, 0.125

# Schedule, replicas of each stage, what they divide, micro-batches, other settings.
CASES: dict[str, tuple[str, tuple[int, ...], str, int, dict[str, Any]]] = {
    "stages": ("1f1b", (1, 1), "", 4, {}),
    "tied stages": ("1f1b", (1, 1), "", 4, {}),
    "replicas": ("gpipe", (2, 2), "", 4, {}),
    "divided state": ("1f1b", (2, 2), "optimizer", 4, {}),
    "two stages a rank": ("interleaved", (1, 1), "", 4, {}),
    "half backwards": ("zb-h1", (1, 1), "", 4, {}),
    "compiled": ("1f1b", (1, 1), "", 4, {"compile": True}),
    "several batches": ("1f1b", (1, 1), "", 4, {"batches": 2}),
    "divided parameters": ("1f1b", (2, 2), "parameters", 4, {}),
    "clipped": ("1f1b", (2, 2), "", 4, {"clip_norm": 0.01}),
    "side by side": ("1f1b", (2, 2), "", 4, {"meet_every": 1}),
    "without a flush": ("2bw", (2, 2), "", 8, {}),
}

TIPPED = ("divided parameters", "clipped")
"""Sums in another order, or a factor: a gradient may be rounded to the neighbour."""


class Recorded(SGD):
    """Keeps copies of the gradients that it steps with."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Record, then step."""
        own = [p for group in self.param_groups for p in group["params"]]
        seen = getattr(self, "seen", [])
        seen.append({p: p.grad.clone() for p in own if p.grad is not None})
        self.seen = seen
        super().step(closure)


def model_of(case: str) -> Chain:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    if case == "tied stages":
        layers[-1][0].weight = layers[0][0].weight  # type: ignore[assignment]
    return Chain(layers).bfloat16()


def batch_of(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = torch.randn(2, rows, WIDTH, generator=generator).bfloat16()
    return made[0], made[1]


def plan_for(case: str) -> Plan:
    schedule, replicas, sharding, micro_batches, _ = CASES[case]
    held = 2 if schedule == "interleaved" else 1
    stages: list[Stage] = []
    for number in range(len(replicas) * held):
        group = number % len(replicas)
        first = sum(replicas[:group])
        width = LAYERS // (len(replicas) * held)
        ends = number + 1 == len(replicas) * held  # with the loss
        layers = range(number * width, (number + 1) * width + ends)
        devices = tuple(range(first, first + replicas[group]))
        rows = (ROWS // len(devices),) * len(devices)
        stages.append(Stage(layers, devices, rows, sharding=sharding))
    return Plan(tuple(stages), micro_batches, ROWS, schedule)


def summed(model: Chain, batch: Sequence[torch.Tensor], rows: Sequence[range]) -> dict[str, Any]:
    """The gradients of micro-batches of a mean, added in float32 in their order."""
    sums: dict[str, torch.Tensor] = {}
    for own in rows:
        model.zero_grad()
        x, y = (tensor[own.start : own.stop] for tensor in batch)
        (nn.functional.mse_loss(model(x), y) * len(own)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0) + parameter.grad.float()
    return sums


def expected(case: str, model: Chain, batches: Sequence[Any], part: int) -> dict[str, Any]:
    """What the optimizer gets: sums over micro-batches, then over replicas, then of tied weights.

    Of pipelines side by side each sums its own ``part`` of the rows.
    """
    parts, settings = CASES[case][1][0], CASES[case][-1]
    size = ROWS // parts
    alone = "meet_every" in settings
    untied = copy.deepcopy(model)
    last: Any = untied.get_submodule(f"{LAYERS - 1}.0")
    last.weight = nn.Parameter(last.weight.detach().clone())
    whole = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
    count = len(whole[0]) // ROWS
    sums: dict[str, Any] = {}
    for own in [part] if alone else range(parts):
        rows = [range(ROWS * m + size * own, ROWS * m + size * (own + 1)) for m in range(count)]
        for name, gradient in summed(untied, whole, rows).items():
            sums[name] = sums.get(name, 0) + gradient
    if case == "tied stages":
        sums["0.0.weight"] += sums.pop(f"{LAYERS - 1}.0.weight")
    means = {name: own / (count * (size if alone else ROWS)) for name, own in sums.items()}
    norm = torch.stack([own.double().square().sum() for own in means.values()]).sum().sqrt()
    factor = min(1.0, settings.get("clip_norm", torch.inf) / float(norm))
    return {name: own * factor for name, own in means.items()}


def problems_of(case: str) -> list[str]:
    """How the gradients with which this rank stepped differ from those that it was to get."""
    *_, settings = CASES[case]
    plan, model, made = plan_for(case), model_of(case), list[Recorded]()
    whole, names = copy.deepcopy(model), dict[torch.Tensor, str]()
    # Without a flush weights change within a batch: there they stay as they are.
    rate = 0.0 if plan.schedule == "2bw" else RATE

    def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> Recorded:
        names.update((parameter, name) for name, parameter in named)
        made.append(Recorded([parameter for _, parameter in named], lr=rate))
        return made[-1]

    join()
    rank, problems = dist.get_rank(), list[str]()
    batches = [batch_of(plan.global_batch, n) for n in range(settings.get("batches", 1))]
    with Pipeline(
        capture_model(model, batches[0], loss=nn.MSELoss(), compile="compile" in settings),
        batches[0],
        plan=plan,
        optimizer=optimizer,
        clip_norm=settings.get("clip_norm"),
        constraints=Constraints(sharding="optimizer") if case == "divided state" else None,
        update=Update(
            gradient_dtype=torch.float32,
            meet_every=settings.get("meet_every", 0),
            outer_momentum=0.5 if "meet_every" in settings else 0.0,
        ),
    ) as pipe:
        for _ in range(1 if case in TIPPED or "meet_every" in settings else STEPS):
            pipe.step(*batches)
            if pipe.verified is not None and not pipe.verified.equal:
                problems.append(str(pipe.verified))
    taken = made[0].seen
    updates = len(taken) // STEPS if case == "without a flush" else 1  # in a batch
    for number, seen in enumerate(taken):
        part = number % updates
        own = [[tensor.chunk(updates)[part] for tensor in batch] for batch in batches]
        want = expected(case, whole, own, rank % 2)
        for parameter, gradient in seen.items():
            name = names[parameter]
            if not name:  # of a rank without parameters
                continue
            wide = want[name]
            if case == "divided parameters":
                wide = wide.chunk(2)[rank % 2]
            near = (gradient.float() - wide).abs() <= 2**-8 * wide.abs() * 1.01
            right = bool(near.all()) if case in TIPPED else torch.equal(gradient, wide.bfloat16())
            if not right or gradient.dtype != parameter.dtype:
                problems.append(f"{name} on rank {rank}")
        for name, parameter in whole.named_parameters():
            parameter.grad = want[name].bfloat16()
        SGD(whole.parameters(), lr=rate).step()
    return problems


def wide_gradients() -> dict[str, list[str]]:
    """Each case's."""
    return {case: problems_of(case) for case in CASES}
