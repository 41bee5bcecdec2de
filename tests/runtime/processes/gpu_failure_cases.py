"""Run by each rank, on a stand-in GPU of its own: a pipeline in which one rank fails."""

import os
from typing import Any

import stand_in_gpu
import torch.distributed as dist
from runtime.pipeline_life_cases import BATCH, Layer, outcome, pipeline

from penstock.torch_internals import abort_group


def steps_until(failure: str) -> tuple[str, str, list[str], int]:
    """The backend, the first step, what rank 0's failure makes of the second, and its aborts.

    ``failure``: in the user's "module", or where it sends a "message".
    """
    stand_in_gpu.install(2)
    aborted: list[Any] = []

    def abort(group: Any) -> None:
        aborted.append(group)
        abort_group(group)

    import penstock.runtime.processes.world as world

    world.abort_group = abort
    pipe = pipeline("auto", device="cuda")
    first = outcome(lambda: pipe.step(BATCH).loss)
    if os.environ["RANK"] == "0":
        if failure == "module":
            Layer.fails = True
        else:
            dist.ProcessGroup.send = out_of_memory
    later = [outcome(lambda: pipe.step(BATCH).loss) for _ in range(2)]
    backend, count = pipe._engine.world.backend, len(aborted)
    pipe.close()
    return backend, first, later, count


def out_of_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB\nmore lines")
