"""What scripts under an elastic agent do; run in worker processes."""

import os
import signal
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from penstock.capture.chain import Chain
from penstock.errors import Infeasible, PenstockError
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage
from penstock.runtime.callbacks import save_at_sigterm
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan_for_ranks import plan_for_ranks


def stages_on(ranks: int, layers: int) -> Plan:
    """A pipeline over all ranks, with the last layers on the last."""
    bounds = [*range(ranks), layers]
    stages = tuple(
        Stage(range(lo, hi), (rank,), (8,)) for rank, (lo, hi) in enumerate(pairwise(bounds))
    )
    return Plan(stages, 4, 8, "1f1b")


def write_hand_made_plans(run: Path, layers: int, *sizes: int) -> None:
    """What `plan_for_ranks` finds for these numbers of ranks."""
    run.mkdir(parents=True, exist_ok=True)
    for ranks in sizes:
        write_plan(stages_on(ranks, layers), run / f"plan-{ranks}.json")


def ask_for_plans(directory: Path, largest: int) -> tuple[list[int], list[str], int]:
    """For which numbers of ranks this rank made plans, what was refused, and stages of the plan.

    Each rank is on a host of its own. Of ``largest`` ranks and more no plan fits.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    made: list[int] = []

    def make(ranks: int) -> Plan:
        made.append(ranks)
        if ranks > largest:
            raise Infeasible(f"{ranks} ranks have too little memory; use more")
        return stages_on(ranks, 6)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = plan_for_ranks(make, directory)
    except PenstockError as failure:
        return made, [type(failure).__name__, str(failure)], 0
    return made, [], len(plan.stages)


def end_by(asking: str, directory: Path) -> tuple[object, int]:
    """How a training of two ranks ends if rank 1 asks for it after its third step.

    Returns the exit code, or "stopped" after `Pipeline.stop`, and the steps taken.
    """
    torch.manual_seed(0)
    batch = (torch.randn(32, 4), torch.randn(32, 4))
    chain = Chain([nn.Linear(4, 4) for _ in range(2)], loss=nn.MSELoss())

    def ask(pipe: Pipeline, event: object) -> None:
        if pipe.rank == 1 and pipe.steps == 3 and asking == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        elif pipe.rank == 1 and pipe.steps == 3:
            pipe.stop()

    with Pipeline(chain, batch, plan=stages_on(2, 3)) as pipe:
        pipe.notify(save_at_sigterm(directory), ask)
        try:
            while not pipe.stopping:
                pipe.step(batch)
        except SystemExit as end:
            return end.code, pipe.steps
        return "stopped", pipe.steps
