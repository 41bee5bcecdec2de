"""What the worker processes of the training and failure tests run."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from refused import named_refusal_of
from runtime.pipeline_cases import (
    MICRO_BATCHES,
    ROWS,
    captured,
    join,
    plan_of,
)
from torch import nn
from torch.optim import AdamW, Optimizer

from penstock.capture.chain import Chain
from penstock.runtime.options import Safety

BATCH = MICRO_BATCHES * ROWS


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


def bad_batches() -> list[str]:
    """The messages for a NaN loss, changed shapes and different batches; then of a good step."""
    join()
    subject, graph = captured("mlp")
    batch = subject.batch(BATCH)
    with Pipeline(
        graph, batch, plan=plan_of(len(graph.layer_names), (1, 1)), optimizer=adam
    ) as pipe:
        weights = [p.detach().clone() for p in pipe.parameters()]
        wrong = batch[0] * float("nan"), batch[0][:, :5], batch[0] + dist.get_rank()
        messages = [named_refusal_of(pipe.step, (x, batch[1])) for x in wrong]
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
    return named_refusal_of(pipe.step, batch), time.monotonic() - start


def has_ended(process: int) -> bool:
    """Whether a process has ended, and with it its connections."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def raise_error() -> None:
    raise ValueError("shape mismatch in the user's code")
