"""What the worker processes of the training and failure tests run."""

import copy
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runtime.pipeline_cases import (
    MICRO_BATCHES,
    ROWS,
    captured,
    compare_one,
    join,
    plan_of,
    qwen2_tied,
)
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.errors import PenstockError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.settings import Safety

BATCH = MICRO_BATCHES * ROWS
CLIP_NORM = 0.05


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def one_after_another(count: int) -> list[float]:
    """The losses of several pipelines, each of which makes torch's default group and leaves it."""
    x, target = torch.randn(2, BATCH, 3, generator=torch.Generator().manual_seed(0))
    found: list[float] = []
    for _ in range(count):
        torch.manual_seed(0)
        model = Chain([nn.Linear(3, 3), nn.Linear(3, 3)], nn.functional.mse_loss)
        with Pipeline(model, (x, target), plan=plan_of(3, (1, 1)), optimizer=adam) as pipe:
            found.append(pipe.step((x, target)).loss)
        assert not dist.is_initialized()
    return found


def train_tied(steps: int) -> list[str]:
    """A tied model trained on four ranks, clipped and scheduled, against one device."""
    join()
    subject, graph = captured("gpt2")
    whole = copy.deepcopy(subject.model)
    optimizer = adam(list(whole.parameters()))
    schedule = warm_up(optimizer)
    batch = subject.batch(BATCH)
    wrong: list[str] = []
    with Pipeline(
        graph,
        batch,
        plan=plan_of(len(graph.layer_names), (1, 2, 1)),
        optimizer=adam,
        learning_rate_schedule=warm_up,
        clip_norm=CLIP_NORM,
    ) as pipe:
        for step in range(steps):
            optimizer.zero_grad()
            loss = subject.whole_loss(whole, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(whole.parameters(), CLIP_NORM)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            metrics = pipe.step(batch)
            expected = (float(loss.detach()), float(norm), rate)
            found = (metrics.loss, metrics.gradient_norm, metrics.learning_rate)
            wrong += [
                f"step {step}: {a} instead of {b}"
                for a, b in zip(found, expected, strict=True)
                if abs(a - b) > 1e-7 * abs(b)
            ]
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        for name, parameter in pipe.named_parameters():
            # Adam divides by the root of tiny gradients, which magnifies rounding.
            if not torch.allclose(parameter, theirs[name], rtol=1e-6, atol=1e-8):
                wrong.append(f"{name} after {steps} steps")
    return wrong


def train_qwen2(steps: int) -> list[float]:
    """Losses of a tied Qwen2 on two ranks."""
    join()
    torch.manual_seed(0)
    subject = qwen2_tied()
    graph = capture_model(subject.model, subject.batch(3))
    batch = subject.batch(BATCH)
    plan = plan_of(len(graph.layer_names), (1, 1))
    with Pipeline(graph, batch, plan=plan, optimizer=adam, autocast=torch.bfloat16) as pipe:
        return [pipe.step(batch).loss for _ in range(steps)]


def losses(
    directory: Path,
    replicas: Sequence[int],
    steps: int,
    *,
    save_at: int = -1,
    resume: bool = False,
) -> list[float]:
    """Losses of a run of ``steps`` steps, with BatchNorm, momentum, and a schedule."""
    subject, graph = captured("convolutions")
    plan = plan_of(len(graph.layer_names), replicas)
    example = subject.batch(BATCH)
    found: list[float] = []
    with Pipeline(
        graph, example, plan=plan, optimizer=adam, learning_rate_schedule=warm_up, clip_norm=1.0
    ) as pipe:
        start = pipe.load(directory) if resume else 0
        for step in range(start, steps):
            if step == save_at:
                pipe.save(directory, keep=1)
            found.append(pipe.step(subject.batch(BATCH - step % 3)).loss)
        found.append(pipe.evaluate(example).loss)
    return found


def resume_elsewhere(directory: Path) -> tuple[list[float], list[float]]:
    """The losses after a checkpoint: of the run that wrote it, and of one under another plan."""
    join()
    through = losses(directory, (2, 1), 8, save_at=4)
    resumed = losses(directory, (1, 1, 2), 8, resume=True)
    return through[4:], resumed


def evaluate_and_verify() -> dict[str, Any]:
    """Evaluation against the plain model; verification; and that neither changes anything."""
    join()
    subject, graph = captured("convolutions")
    batch, whole = subject.batch(BATCH), copy.deepcopy(subject.model)
    with Pipeline(
        graph, batch, plan=plan_of(len(graph.layer_names), (2, 1)), optimizer=adam
    ) as pipe:
        pipe.step(batch)
        weights = pipe.model_state_dict()
        box: list[Any] = [weights]
        dist.broadcast_object_list(box, 0)
        whole.load_state_dict(box[0])
        whole.eval()
        with torch.no_grad():
            expected = float(subject.whole_loss(whole, batch))
        before = {n: t.detach().clone() for n, t in pipe._engine.held.named_tensors().items()}
        loss = pipe.evaluate(batch).loss
        result = pipe.verify(subject.batch(7))
        same = all(torch.equal(t, before[n]) for n, t in pipe._engine.held.named_tensors().items())
        timeline = pipe.timeline()
    return {
        "loss": loss,
        "expected": expected,
        "equal": result.equal,
        "text": str(result),
        "largest": result.largest,
        "unchanged": same,
        "events": [(e.device, e.kind, e.micro_batch) for e in timeline.events],
        "start_s": timeline.events[0].start_s,
    }


def verify_with_a_wrong_gradient() -> str:
    """What `verify` says of a pipeline that doubles one gradient."""
    join()
    subject, graph = captured("mlp")
    batch = subject.batch(BATCH)
    with Pipeline(graph, batch, plan=plan_of(len(graph.layer_names), (1, 1))) as pipe:
        for name, parameter in pipe.named_parameters():
            if name == "3.0.weight":
                parameter.register_hook(lambda gradient: gradient * 2)
        return str(pipe.verify(batch))


def bad_batches() -> list[str]:
    """The messages for a NaN loss, changed shapes and different batches; then of a good step."""
    join()
    subject, graph = captured("mlp")
    batch = subject.batch(BATCH)
    messages: list[str] = []
    with Pipeline(
        graph, batch, plan=plan_of(len(graph.layer_names), (1, 1)), optimizer=adam
    ) as pipe:
        weights = [p.detach().clone() for p in pipe.parameters()]
        for wrong in (
            (batch[0] * float("nan"), batch[1]),
            (batch[0][:, :5], batch[1]),
            (batch[0] + dist.get_rank(), batch[1]),
        ):
            try:
                pipe.step(wrong)
            except PenstockError as refusal:
                messages.append(f"{type(refusal).__name__}: {refusal}")
        kept = all(torch.equal(p, w) for p, w in zip(pipe.parameters(), weights, strict=True))
        messages.append(f"weights kept: {kept}, then step {pipe.step(batch).step}")
    return messages


class Misbehaving(nn.Module):
    """Passes tensors on, until it is told to misbehave in its forward."""

    deed: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Do the deed, if any, and pass ``x`` on."""
        if Misbehaving.deed is not None:
            Misbehaving.deed()
        return x * 1.0


def fail_at_rank_one(deed: str, transport: str, replicas: Sequence[int]) -> tuple[str, float]:
    """The message of each surviving rank when stage 1 fails, and the seconds until it came."""
    join()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), Misbehaving()) for _ in replicas]
    chain = Chain(layers, loss=nn.MSELoss())
    batch = (torch.randn(BATCH, 4), torch.randn(BATCH, 4))
    plan = plan_of(len(replicas) + 1, replicas)
    pipe = Pipeline(chain, batch, plan=plan, timeout_s=3.0, safety=Safety(transport=transport))
    pipe.step(batch)
    if deed == "die between steps":
        processes = pipe._world.all_gather(os.getpid())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not has_ended(processes[1]):
            time.sleep(0.01)
    elif dist.get_rank() == 1:
        Misbehaving.deed = {
            "raise": raise_error,
            "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stall": lambda: time.sleep(3600),
        }[deed]
    start = time.monotonic()
    try:
        pipe.step(batch)
    except PenstockError as failure:
        return f"{type(failure).__name__}: {failure}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def has_ended(process: int) -> bool:
    """Whether a process has ended, and with it its connections."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def raise_error() -> None:
    raise ValueError("shape mismatch in the user's code")


def seven_rows_in_four_micro_batches() -> dict[str, list[str]]:
    """What differs from one device on the last batch of 7 rows of a plan of 4 x 2; the cut."""
    join()
    found: dict[str, list[str]] = {}
    for name in ("mlp", "convolutions"):
        subject, graph = captured(name)
        for schedule in ("gpipe", "1f1b"):
            plan = plan_of(len(graph.layer_names), (1, 1), schedule, micro_batches=4, rows=2)
            found[f"{name}, {schedule}"] = compare_one(subject, graph, plan, sizes=(8, 7, 3))
    with Pipeline(graph, subject.batch(8), plan=plan) as pipe:
        for rows in (8, 7):
            pipe.step(subject.batch(rows))
        counts = {
            name: int(tensor)
            for name, tensor in pipe._engine.held.named_tensors().items()
            if name.endswith("num_batches_tracked")
        }
        cut = pipe._engine.stages.program(7).cut.micro_batches
    found["cut"] = [f"{len(rows)} rows" for rows in cut]
    found["updates"] = [f"{name}: {count}" for name, count in counts.items() if count != 8]
    return found


def on_two_ranks() -> dict[str, Any]:
    """Several cases in one pair of processes, whose start takes longer than they do."""
    return {
        "qwen2": train_qwen2(15),
        "wrong gradient": verify_with_a_wrong_gradient(),
        "bad batches": bad_batches(),
        "seven rows": seven_rows_in_four_micro_batches(),
    }
