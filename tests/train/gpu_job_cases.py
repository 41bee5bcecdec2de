"""Run by each rank, on a stand-in for GPUs: all of ``penstock train``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import stand_in_gpu

from penstock.measure import links
from penstock.runtime.transport.process_groups import GroupTransport
from penstock.runtime.transport.shared_memory.staged import StagedTransport
from penstock.train.job_file import find_job
from penstock.train.rank_program import run_local_rank
from penstock.train.train_request import TrainRequest, TrainResult

STEPS = 6

SMALL_MESSAGES = (4096, 1 << 20)
"""What fills a link between GPUs takes long between processes."""


def trained(gpus: int, plan: Path, out: Path) -> tuple[float, set[str]]:
    """The last loss of a short run, where it returns one, and the transports that were opened."""
    stand_in_gpu.install(gpus)
    opened = set[str]()
    for kind in (GroupTransport, StagedTransport):
        noted(kind, opened)
    links.GPU_SIZES_BYTES = SMALL_MESSAGES
    small = replace(find_job("digits"), steps=STEPS, evaluate_every=STEPS, checkpoint_every=STEPS)
    request = TrainRequest(2, plan, device="cuda", out=out, shown=False)
    result = run_local_rank(small, request, TrainResult(), 0)
    return getattr(result, "loss", float("nan")), opened


def noted(kind: Any, opened: set[str]) -> None:
    """Note each transport of a kind that begins an iteration."""
    begin = kind.begin

    def noting(transport: Any) -> None:
        opened.add(type(transport).__name__)
        begin(transport)

    kind.begin = noting
