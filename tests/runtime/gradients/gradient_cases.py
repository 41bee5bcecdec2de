"""What the worker processes of the gradient tests run: sharding, accumulation, scaling."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import (
    MICRO_BATCHES,
    ROWS,
    Subject,
    captured,
    differences,
    join,
    plan_of,
    reference,
    sliced,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan
from penstock.runtime.tables import Constraints
from penstock.train.optimizers import MuonWithAdamW

BATCH = MICRO_BATCHES * ROWS
CLIP_NORM = 0.05

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw, fused": lambda p: AdamW(p, lr=0.02, weight_decay=0.1, fused=True),
    "adamw, foreach": lambda p: AdamW(p, lr=0.02, weight_decay=0.1, foreach=True),
    "adam, neither": lambda p: Adam(p, lr=0.02, foreach=False),
    "sgd, fused": lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True),
    "muon": lambda p: MuonWithAdamW(p, lr=0.02, weight_decay=0.1),
}

SHARDED: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "replicas": ("mlp", "1f1b", (2, 1), "adamw, fused"),
    "three replicas": ("mlp", "gpipe", (3, 1), "adamw, foreach"),
    "replicas of two stages a rank": ("mlp", "interleaved", (2, 2), "adam, neither"),
    "mirrored": ("mlp", "chimera", (1, 1), "sgd, fused"),
    "tied": ("gpt2", "1f1b", (1, 2, 1), "adamw, fused"),
    "whole matrices": ("mlp", "1f1b", (2, 2), "muon"),
}


# Sums of squares in another order give norms that differ in the last bit, so these are not clipped.
UNCLIPPED = {"replicas", "replicas of two stages a rank", "mirrored"}


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def planned(name: str, schedule: str, replicas: Sequence[int]) -> tuple[Subject, Any, Plan]:
    subject, graph = captured(name)
    micro_batches = 4 if schedule in ("interleaved", "chimera") else MICRO_BATCHES
    layers = len(graph.layer_names)
    return subject, graph, plan_of(layers, replicas, schedule, micro_batches=micro_batches)


def trained(case: str, steps: int, *, shard: bool) -> dict[str, Any]:
    """Weights, norms and bytes of state after some steps of a case."""
    name, schedule, replicas, optimizer = SHARDED[case]
    subject, graph, plan = planned(name, schedule, replicas)
    with Pipeline(
        graph,
        subject.batch(plan.global_batch),
        plan=plan,
        optimizer=OPTIMIZERS[optimizer],
        learning_rate_schedule=warm_up,
        clip_norm=None if case in UNCLIPPED else CLIP_NORM,
        constraints=Constraints(sharding="optimizer") if shard else None,
    ) as pipe:
        norms = [
            pipe.step(subject.batch(plan.global_batch - step % 2)).gradient_norm
            for step in range(steps)
        ]
        verified = str(pipe.verify(subject.batch(plan.global_batch)))
        state = pipe.state_dict()
        kept = [t for n, t in state.items() if n.startswith("optimizer.") and t.dim()]
        values = {n: p.detach().clone() for n, p in pipe.named_parameters()}
    return {
        "norms": norms,
        "values": values,
        "state": sum(tensor.nbytes for tensor in kept),
        "held": sum(value.nbytes for value in values.values()),
        "verified": verified,
    }


def sharded_against_unsharded(steps: int) -> dict[str, dict[str, Any]]:
    """For each case: how far a sharded run is from the others, and the state that it keeps."""
    join()
    found: dict[str, dict[str, Any]] = {}
    for case in SHARDED:
        plain, sharded = (trained(case, steps, shard=shard) for shard in (False, True))
        found[case] = {
            "from unsharded": largest_gap(sharded["values"], plain["values"]),
            "norms": (sharded["norms"], plain["norms"]),
            "state": (plain["state"], sharded["state"], sharded["held"]),
            "verified": sharded["verified"],
        }
    return found


def largest_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference between tensors of the same names."""
    return max((float((t - theirs[name]).abs().max()) for name, t in ours.items()), default=0.0)


def sharded_losses(
    directory: Path, replicas: Sequence[int], steps: int, *, shard: bool, save_at: int = -1
) -> list[float]:
    """Losses of a run that saves before step ``save_at``, or (-1) starts from a checkpoint."""
    subject, graph = captured("convolutions")
    plan = plan_of(len(graph.layer_names), replicas)
    found: list[float] = []
    with Pipeline(
        graph,
        subject.batch(BATCH),
        plan=plan,
        optimizer=OPTIMIZERS["adamw, fused"],
        learning_rate_schedule=warm_up,
        constraints=Constraints(sharding="optimizer") if shard else None,
    ) as pipe:
        start = pipe.load(directory) if save_at < 0 else 0
        for step in range(start, steps):
            if step == save_at:
                pipe.save(directory)
            found.append(pipe.step(subject.batch(BATCH - step % 3)).loss)
        found.append(pipe.evaluate(subject.batch(BATCH)).loss)
    return found


def resharded(directory: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Losses after a checkpoint of a run that goes through, and of one under another plan."""
    join()
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, first, second in (("taken up unsharded", True, False), ("sharded", False, True)):
        own = directory / name.replace(" ", "-")
        through = sharded_losses(own, (2, 1), 6, shard=first, save_at=3)
        resumed = sharded_losses(own, (1, 3), 6, shard=second)
        found[name] = (through[3:], resumed)
    return found


ACCUMULATED: tuple[tuple[str, str, tuple[int, ...], bool], ...] = (
    ("mlp", "gpipe", (1, 1), False),
    ("mlp", "1f1b", (2, 1), False),
    ("mlp", "1f1b", (2, 1), True),
    ("mlp", "zb-h1", (1, 2), False),
    ("mlp", "interleaved", (2, 1), False),
    ("mlp", "chimera", (1, 1), False),
    ("gpt2", "1f1b", (1, 2, 1), False),
    ("convolutions", "1f1b", (2, 1), False),
)


def accumulated() -> dict[str, Any]:
    """What differs between a step on three batches and one process on all of their rows."""
    join()
    found: dict[str, Any] = {}
    for name, schedule, replicas, shard in ACCUMULATED:
        case = f"{name}, {schedule}, replicas {replicas}{', sharded' if shard else ''}"
        found[case] = accumulated_in(name, schedule, replicas, shard)
    return found


def accumulated_in(
    name: str, schedule: str, replicas: Sequence[int], shard: bool
) -> dict[str, list[str]]:
    """What is wrong after a step on batches of 12, 12 and 7 rows, and after a step on one."""
    subject, graph, plan = planned(name, schedule, replicas)
    batch = subject.batch(31)
    sizes = (range(12), range(12, 24), range(24, 31))
    with Pipeline(
        graph,
        subject.batch(4),
        plan=plan,
        constraints=Constraints(sharding="optimizer") if shard else None,
        clip_norm=1e-3,
    ) as pipe:
        engine = pipe._engine
        cut = [
            range(rows.start + own.start, rows.start + own.stop)
            for rows in sizes
            for own in engine.stages.program(len(rows)).cut.micro_batches
        ]
        whole = copy.deepcopy(subject.model)
        loss = float(reference(subject, whole, batch, cut))
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 1e-3))
        metrics = pipe.step(*(sliced(batch, rows) for rows in sizes))
        expected = {"loss": loss, "gradient_norm": norm, "samples": 31.0, "step": 1.0}
        wrong = [
            f"{key} {getattr(metrics, key)} instead of {value}"
            for key, value in expected.items()
            if abs(getattr(metrics, key) - value) > 1e-9 * abs(value)
        ]
        counted = {n for n, _ in pipe.named_parameters() if engine.held.owns(n) or not shard}
        wrong += [
            what
            for what in differences(pipe, whole, 1e-8)
            if what.startswith("buffer") or what.removeprefix("gradient of ") in counted
        ]
        events = [e for e in pipe.timeline().events if e.device == dist.get_rank()]
        start_s = pipe.timeline().events[0].start_s
        reductions = sum(e.kind == "REDUCE" for e in events)
        forwards = sorted((e.stage, e.micro_batch) for e in events if e.kind == "F")
        pipe.step(sliced(batch, sizes[0]))
        again = [e for e in pipe.timeline().events if e.device == dist.get_rank()]
        once = sum(e.kind == "REDUCE" for e in again)
    if abs(start_s) > 1:
        wrong.append(f"the timeline starts at {start_s} s")
    if len(set(forwards)) != len(forwards):
        wrong.append("two forwards have one number")
    if reductions != once:
        wrong.append(f"{reductions} sums over ranks instead of {once}")
    return wrong


def overflow_on_one_rank(steps: int, overflowing: Sequence[int]) -> dict[str, Any]:
    """A run in float16 whose gradients overflow on the last rank only, in some steps."""
    join()
    torch.manual_seed(0)
    subject, _, plan = planned("mlp", "1f1b", (1, 2))
    subject.model.float()
    batch = tuple(tensor.float() for tensor in subject.batch(BATCH))
    graph = capture_model(subject.model, batch)
    found: dict[str, Any] = {"metrics": [], "kept": []}
    now: list[int] = []
    with Pipeline(
        graph,
        batch,
        plan=plan,
        optimizer=OPTIMIZERS["adamw, fused"],
        learning_rate_schedule=warm_up,
        autocast=torch.float16,
        constraints=Constraints(sharding="optimizer"),
    ) as pipe:
        if dist.get_rank() == 2:
            parameter = list(pipe.parameters())[-1]
            parameter.register_hook(lambda g: g * float("inf") if now[-1] in overflowing else g)
        for step in range(steps):
            now.append(step)
            before = [p.detach().clone() for p in pipe.parameters()]
            metrics = pipe.step(batch)
            pairs = zip(pipe.parameters(), before, strict=True)
            found["kept"].append(all(torch.equal(p, b) for p, b in pairs) if before else None)
            found["metrics"].append(
                (metrics.step, metrics.skipped, metrics.loss_scale, metrics.learning_rate)
            )
    return found


def smaller_cases(directory: Path) -> dict[str, Any]:
    """Several cases in one set of processes, whose start takes longer than they do."""
    return {
        "resharded": resharded(directory),
        "overflow": overflow_on_one_rank(6, (2, 3)),
    }
