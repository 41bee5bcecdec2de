"""What worker processes run of the matrix on stand-in GPUs, one for each rank."""

import os
from collections.abc import Sequence

import stand_in_gpu
from runtime.matrix_cases import play
from runtime.matrix_plans import Case


def play_on_gpus(cases: Sequence[Case]) -> tuple[dict[Case, list[str]], list[str]]:
    """What is wrong in each case on this rank, and where the host waited inside iterations."""
    stand_in_gpu.install(int(os.environ["WORLD_SIZE"]), first_use_s=120.0)
    found = play(cases, f"cuda:{os.environ['RANK']}")
    inside = {
        f"{wait.why} at {wait.calls[0]}" for wait in stand_in_gpu.waits() if wait.within("execute")
    }
    return found, sorted(inside)
