"""What the worker processes of the tests of the comparison of replicas run: a bit is flipped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import MICRO_BATCHES, plan_of
from runtime.update.bad_number_cases import LAYERS, ROWS, Block, batch_of
from torch import nn
from torch.optim import AdamW

from penstock.capture.chain import Chain
from penstock.errors import PenstockError
from penstock.runtime.options import Safety
from penstock.runtime.tables import Constraints


@dataclass(frozen=True)
class FlipCase:
    """A pipeline of groups with these numbers of replicas; ``rank`` flips a bit before step 3."""

    replicas: tuple[int, ...]
    rank: int = -1
    schedule: str = "1f1b"
    sharded: bool = False
    every: int = 2


def steps_until_noticed(case: FlipCase) -> tuple[int, str]:
    """The steps that were taken, and the error's class and message."""
    torch.manual_seed(3)
    model = Chain([Block() for _ in range(LAYERS)], loss=nn.functional.mse_loss)
    if case.schedule == "chimera":
        # A mirrored schedule has no batch normalisation.
        model = Chain([nn.Linear(6, 6) for _ in range(LAYERS)], loss=nn.functional.mse_loss)
    rows = MICRO_BATCHES * ROWS
    micro_batches = 4 if case.schedule == "chimera" else MICRO_BATCHES
    plan = plan_of(
        LAYERS + 1,
        case.replicas,
        case.schedule,
        micro_batches=micro_batches,
        rows=rows // micro_batches,
    )
    with Pipeline(
        model,
        batch_of(0),
        plan=plan,
        optimizer=lambda p: AdamW(p, lr=0.01),
        constraints=Constraints(sharding="optimizer") if case.sharded else None,
        safety=Safety(compare_replicas_every=case.every),
        timeout_s=60,
    ) as pipe:
        try:
            for step in range(1, 7):
                if step == 3 and pipe.rank == case.rank:
                    flip_a_bit(pipe)
                pipe.step(batch_of(step))
        except PenstockError as failure:
            return pipe.steps, f"{type(failure).__name__}: {failure}"
        return pipe.steps, "nothing"


def flip_a_bit(pipe: Pipeline) -> None:
    """Flip the lowest bit of one value, which no loss would show."""
    weight = [p for _, p in pipe.named_parameters() if p.dim() == 2][-1]
    with torch.no_grad():
        weight.view(torch.int32)[1, 2] ^= 1


def noticed(cases: Sequence[FlipCase]) -> dict[Any, tuple[int, str]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return {case: steps_until_noticed(case) for case in cases}
