"""Peak memory of a rank over some iterations, in processes that have run nothing else."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, bounds_of
from contenders import Ours, Rival
from models import make_model

ITERATIONS = 3


def measure_memory(name: str, model_name: str, micro_batches: int, whose: str) -> dict[str, Any]:
    """Mebibytes of each rank: resident before the first iteration, and at most in three."""
    case = CASES[name]
    # Each rank holds the weights of its own stages only: the rival is given no others, and ours
    # makes no others.
    with torch.device("meta" if whose == "ours" else "cpu"):
        model = make_model(model_name)
    bounds = bounds_of(case, model_name, len(model.blocks), dist.get_world_size())
    make = Ours if whose == "ours" else Rival
    contender = make(case, model, bounds, micro_batches)
    batch = model.batch(micro_batches)
    model.blocks.clear()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    for _ in range(ITERATIONS):
        contender.prepare()
        contender.step(batch)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (before, status_mib("VmHWM")))
    contender.close()
    return {
        "case": name,
        "model": model_name,
        "micro_batches": micro_batches,
        "whose": whose,
        "before_mib": [round(before, 1) for before, _ in peaks],
        "peak_mib": [round(peak, 1) for _, peak in peaks],
    }


def status_mib(field: str) -> float:
    """A size from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)
