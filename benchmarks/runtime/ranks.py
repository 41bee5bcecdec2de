"""A rank's process of the benchmark: runs the tasks of a file, rank 0 writes what they give."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparing import compare
from memory import measure_memory
from replicas import compare_data_parallel

sys.path.append(str(Path(__file__).parents[1] / "pays"))

from comparison import compare_case

KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "compare": compare,
    "memory": measure_memory,
    "case": compare_case,
    "data_parallel": compare_data_parallel,
}


def main() -> None:
    """``ranks.py TASKS RESULTS``: a task is a kind and its settings, a result a line of JSON."""
    tasks, results = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo")
    for kind, settings in json.loads(tasks.read_text()):
        found = KINDS[kind](**settings)
        if rank == 0:
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
