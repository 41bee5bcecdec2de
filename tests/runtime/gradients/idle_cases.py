"""What the worker processes of the tests of parameters without a gradient run.

Every rank trains the module left whole in the same way: which weights get a gradient depends on the
step, on the values of the rows, and on the layers behind.
"""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import join
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.tables import Constraints

WIDTH, ROWS, STEPS, LAYERS = 6, 4, 8, 8

ADAMW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: AdamW(p, **ADAMW),
    "foreach": lambda p: AdamW(p, **ADAMW, foreach=True),
    "fused": lambda p: AdamW(p, **ADAMW, fused=True),
    "adam": lambda p: Adam(p, lr=0.02, weight_decay=0.1, amsgrad=True),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
}

# Schedule, replicas of each stage, the optimizer, choices of the stages, other settings.
CASES: dict[str, tuple[str, tuple[int, ...], str, dict[str, Any], dict[str, Any]]] = {
    "stages": ("1f1b", (1, 1), "adamw", {}, {}),
    "four stages": ("gpipe", (1, 1, 1, 1), "foreach", {}, {}),
    "replicas": ("1f1b", (2, 2), "momentum", {}, {}),
    "clipped replicas": ("gpipe", (3, 1), "fused", {}, {"clip_norm": 0.3}),
    "sent": ("1f1b", (2, 2), "adam", {}, {"transport": "process-groups"}),
    "divided state": ("1f1b", (2, 2), "adamw", {}, {"shard_optimizer": True, "clip_norm": 0.3}),
    "divided parameters": ("1f1b", (2, 2), "adamw", {"sharding": "parameters"}, {}),
    "divided by block": (
        "1f1b",
        (2, 2),
        "adamw",
        {"sharding": "parameters", "by_block": True},
        {},
    ),
    "half backwards": ("zb-h1", (1, 1), "adamw", {}, {}),
    "recomputed": ("1f1b", (1, 2), "adam", {"recompute": True}, {}),
    "two stages a rank": ("interleaved", (1, 1), "adamw", {}, {}),
    "several batches": ("1f1b", (1, 2), "momentum", {}, {"batches": 2}),
    "verified": ("1f1b", (1, 2), "adamw", {}, {"verify_every": 1}),
    "resumed": ("1f1b", (1, 2), "adamw", {}, {"shard_optimizer": True, "resumed": True}),
}


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)


class Tanh(nn.Module):
    """Reads all its weights in some steps only, and gives no gradient to its input in some."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.scale = weight(), nn.Parameter(torch.ones(WIDTH))
        self.scaled, self.stops = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ((x.detach() if self.stops else x) @ self.main).tanh()
        return y * self.scale if self.scaled else y


class Rarely(nn.Module):
    """Weights of its own for rows with a large first value."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.main, self.rare, self.above = weight(), weight(), above

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (rows,) = torch.where(x[:, 0] > self.above)
        y = x + x @ self.main
        return y.index_add(0, rows, x[rows] @ self.rare) if len(rows) else y


class Both(nn.Module):
    """Makes two results, of which the module after it may read one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = weight(), weight()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.one, x @ self.two


class Joined(nn.Module):
    """Reads two results, or the first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.reads = weight(), True

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return (one + two.tanh() if self.reads else one) @ self.last


class Parts(nn.Module):
    """The modules above one after another; two layers far apart share their rare weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Tanh(), Rarely(0.9), Tanh()
        self.both, self.joined = Both(), Joined()
        self.d, self.e = Rarely(1.0), nn.Linear(WIDTH, WIDTH)
        self.d.rare = self.b.rare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.both(self.c(self.b(self.a(x))))
        return self.e(self.d(self.joined(one, two)))

    def set_up(self, step: int) -> None:
        self.a.scaled, self.c.scaled = step % 2 == 0, step % 3 == 0
        self.c.stops, self.joined.reads = step % 4 == 3, step % 4 < 2


def parts() -> Parts:
    torch.manual_seed(1)
    return Parts().double()


def batch_of(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, rows, WIDTH, generator=made, dtype=torch.float64)
    return (x * 3, y) if step % 3 == 0 else (x / 9, y)


def plan_of(case: str) -> Plan:
    schedule, replicas, _, choices, _ = CASES[case]
    held = 2 if schedule == "interleaved" else 1
    count = len(replicas) * held
    bounds = [round(LAYERS * number / count) for number in range(count + 1)]
    firsts = [0, *accumulate(replicas)]
    stages: list[Stage] = []
    for number in range(count):
        group = number % len(replicas)
        devices = tuple(range(firsts[group], firsts[group + 1]))
        rows = tuple(len(part) for part in torch.arange(ROWS).chunk(len(devices)))
        rows = (2, 1, 1) if len(devices) == 3 else rows
        own = choices if len(devices) > 1 or "sharding" not in choices else {}
        stages.append(Stage(range(bounds[number], bounds[number + 1]), devices, rows, **own))
    return Plan(tuple(stages), 4, ROWS, schedule)


class Alongside:
    """The module left whole, trained by this rank alone."""

    def __init__(self, make: str, clip: float | None) -> None:
        self.model = parts()
        self.losses, self.idle, self._clip = list[float](), 0, clip or torch.inf
        self._make = make
        self.restart()

    def restart(self) -> None:
        """Make the optimizer of the module's weights as they are."""
        self._optimizer: Optimizer = OPTIMIZERS[self._make](self.model.parameters())

    def step(self, batches: Sequence[Any]) -> None:
        """Take a step on batches, as on one."""
        x, y = (torch.cat(own) for own in zip(*batches, strict=True))
        self._optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.idle += sum(p.grad is None for p in self.model.parameters())
        self._optimizer.step()
        self.losses.append(float(loss.detach()))


def problems_of(case: str) -> Iterator[str]:
    """How training differs from that of the module left whole, on this rank."""
    _, _, make, _, settings = CASES[case]
    plan, model, alone = plan_of(case), parts(), Alongside(make, settings.get("clip_norm"))
    if "divided" in case and "state" not in case:  # divided parameters are not shared by stages
        for each in (model, alone.model):
            each.d.rare = copy.deepcopy(each.d.rare)
        alone.restart()
    example = batch_of(plan.global_batch, 0)
    graph = capture_model(model, example, loss=nn.MSELoss())
    assert len(graph.layer_names) == LAYERS, graph.layer_names
    connect = partial(
        Pipeline,
        graph,
        example,
        plan=plan,
        optimizer=OPTIMIZERS[make],
        clip_norm=settings.get("clip_norm"),
        constraints=Constraints(sharding="optimizer") if "shard_optimizer" in settings else None,
        verify="first-step" if "verify_every" in settings else "off",
        safety=Safety(
            verify_every=settings.get("verify_every", 0),
            transport=settings.get("transport", "auto"),
        ),
    )

    def batches() -> Iterator[list[Any]]:
        for step in range(STEPS):
            for each in (model, alone.model):
                each.set_up(step)
            own = [
                batch_of(plan.global_batch, step + 10 * n)
                for n in range(settings.get("batches", 1))
            ]
            alone.step(own)
            yield own

    pipe = connect()
    losses: list[float] = []
    for step, own in enumerate(batches()):
        losses.append(pipe.step(*own).loss)
        if step == STEPS // 2 and "resumed" in settings:
            with tempfile.TemporaryDirectory() as made:
                folder = [made]
                dist.broadcast_object_list(folder)
                pipe.save(folder[0])
                pipe.close()
                pipe = connect()
                pipe.load(folder[0])
                dist.barrier()
    values = pipe.model_state_dict()
    pipe.close()
    for step, (found, expected) in enumerate(zip(losses, alone.losses, strict=True)):
        if not abs(found - expected) < 1e-12:
            yield f"loss of step {step} is {found}, and not {expected}"
    for name, value in alone.model.named_parameters() if dist.get_rank() == 0 else ():
        gap = float((values[name] - value).abs().max())
        if not gap < 1e-11:
            yield f"{name} is off by {gap}"
    if alone.idle < 2 * STEPS:
        yield f"only {alone.idle} gradients were none"


class Seen(AdamW):
    """Keeps which weights had a gradient in each update, and changes none."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [p for group in self.param_groups for p in group["params"]]
        self.seen = [*getattr(self, "seen", []), [p.grad is not None for p in own]]
        super().step(closure)


def problems_without_a_flush(schedule: str) -> Iterator[str]:
    """Which updates had other gradients than those of the module left whole, on this rank."""
    plan, model, made = replace(plan_of("replicas"), schedule=schedule), parts(), list[Seen]()
    names: list[str] = []
    model.d.rare = copy.deepcopy(model.d.rare)  # untied: the stages update at other times
    whole = copy.deepcopy(model)

    def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        names.extend(name for name, _ in named)
        made.append(Seen([p for _, p in named], lr=0.0))
        return made[-1]

    example = batch_of(plan.global_batch, 0)
    graph = capture_model(model, example, loss=nn.MSELoss())
    expected: list[list[bool]] = []
    with Pipeline(graph, example, plan=plan, optimizer=optimizer, verify="off") as pipe:
        for step in range(STEPS):
            for each in (model, whole):
                each.set_up(step)
            x, y = batch_of(plan.global_batch, step)
            pipe.step((x, y))
            updates = len(made[0].seen) // (step + 1)
            for own, wanted in zip(x.chunk(updates), y.chunk(updates), strict=True):
                whole.zero_grad()
                nn.functional.mse_loss(whole(own), wanted).backward()
                expected.append([whole.get_parameter(name).grad is not None for name in names])
    for number, pair in enumerate(zip(made[0].seen, expected, strict=True)):
        off = [name for name, found, own in zip(names, *pair, strict=True) if found != own]
        if off:
            yield f"update {number} of {schedule}: {off}"
    if all(map(all, expected)):
        yield "no gradient was none"


def every_problem() -> dict[str, list[str]]:
    """Each case's."""
    join()
    found = {case: list(problems_of(case)) for case in CASES}
    return found | {name: list(problems_without_a_flush(name)) for name in ("pipedream", "2bw")}
