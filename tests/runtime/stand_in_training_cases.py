"""What worker processes train on CPUs and on stand-in GPUs, one for each rank, to be compared."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import stand_in_gpu
import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime import matrix_cases
from runtime.matrix_plans import Case
from torch import nn

from penstock.plan.plan import Plan
from penstock.runtime.options import Safety, StateOn, Update
from penstock.runtime.tables import Constraints

STEPS = 3


class Detached(nn.Module):
    """The last layer reads an early tensor to which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first tensor skips two layers, detached."""
        early = torch.tanh(self.first(x))
        late = torch.tanh(self.third(torch.tanh(self.second(early))))
        return self.last(late + early.detach())


def detached() -> matrix_cases.Subject:
    loss, normal = nn.MSELoss(), matrix_cases.normal
    return matrix_cases.Subject(
        Detached(), lambda rows: (normal(rows, 6, 1), normal(rows, 6, 2)), loss
    )


matrix_cases.OWN_SUBJECTS["detached"] = detached


@dataclass(frozen=True)
class Run:
    """A case and what else is chosen; ``sharding`` is that of each stage of several replicas."""

    case: Case
    sharding: str = ""
    shard_optimizer: bool = False
    clip_norm: float | None = None
    state_on: StateOn = "device"

    def __str__(self) -> str:
        chosen = [self.sharding] * bool(self.sharding) + ["ZeRO-1"] * self.shard_optimizer
        chosen += ["clipped"] * (self.clip_norm is not None)
        chosen += ["state on the host"] * (self.state_on == "host")
        return ", ".join([str(self.case), *chosen])

    def plan(self, layers: int) -> Plan:
        """The plan for a model of so many layers."""
        plan = self.case.plan(layers)
        if not self.sharding:
            return plan
        stages = (
            replace(stage, sharding=self.sharding) if stage.replicas > 1 else stage
            for stage in plan.stages
        )
        return replace(plan, stages=tuple(stages))


@dataclass(frozen=True)
class Trained:
    """What a rank has after a run: losses, its tensors as a digest, and how they went.

    ``waits`` are places where the host waited for a GPU inside the last iteration.
    """

    losses: tuple[str, ...]
    tensors: str
    transport: str
    backend: str
    waits: tuple[str, ...]


def train(runs: Sequence[Run], on_gpus: bool) -> list[Trained]:
    """Every run on this rank, on the CPU or on its own stand-in GPU, by process groups."""
    if on_gpus:
        stand_in_gpu.install(int(os.environ["WORLD_SIZE"]), first_use_s=120.0)
        matrix_cases.DEVICE = torch.device("cuda", int(os.environ["RANK"]))
        torch.cuda.set_device(matrix_cases.DEVICE)
    dist.init_process_group("gloo")
    return [trained(run) for run in runs]


def trained(run: Run) -> Trained:
    case = run.case
    subject, graph = matrix_cases.captured(case.model, not case.autocast)
    plan = run.plan(len(graph.layer_names))
    batch = matrix_cases.batch_of(subject, plan.global_batch, not case.autocast)
    with Pipeline(
        graph,
        batch,
        plan=plan,
        optimizer=matrix_cases.make_optimizer(case.optimizer),
        constraints=Constraints(sharding="optimizer") if run.shard_optimizer else None,
        clip_norm=run.clip_norm,
        autocast=torch.bfloat16 if case.autocast else None,
        update=Update(state_on=run.state_on),
        safety=Safety(transport="process-groups"),
        timeout_s=100,
        device=matrix_cases.DEVICE,
        verify="off",
    ) as pipe:
        # The graph's own tensors are trained: they must start anew in the next run.
        kept = {n: t.detach().clone() for n, t in pipe._engine.held.named_tensors().items()}
        losses = [metrics.loss.hex() for metrics in pipe.stream([batch] * (STEPS - 1))]
        stand_in_gpu.clear_waits()
        losses += [metrics.loss.hex() for metrics in pipe.stream([batch])]
        waits = stand_in_gpu.waits()
        held: dict[str, Any] = pipe._engine.held.named_tensors()
        digest = hashlib.sha256()
        for name in sorted(held):
            digest.update(name.encode() + held[name].detach().cpu().double().numpy().tobytes())
        inside = {str(wait) for wait in waits if wait.within("execute")}
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(kept[name])
        own = type(pipe._engine.transport).__name__, pipe._engine.world.backend
        pipe.close(gather=True)
    return Trained(tuple(losses), digest.hexdigest(), *own, tuple(sorted(inside)))
