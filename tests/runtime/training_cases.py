"""What the worker processes of the training and failure tests run."""

import copy
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import (
    MICRO_BATCHES,
    ROWS,
    captured,
    join,
    plan_of,
)
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from penstock.capture.chain import Chain
from penstock.errors import PenstockError
from penstock.runtime.options import Safety

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
        processes = pipe._engine.world.all_gather(os.getpid())
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
