"""A rank's process of the benchmark: runs the tasks of a file, rank 0 writes what they give."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from comparing import compare

__all__ = ["main"]


def main() -> None:
    """``ranks.py TASKS RESULTS``: each task is a JSON object, each result a line of JSON."""
    tasks, results = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo")
    for task in json.loads(tasks.read_text()):
        found = compare(**task)
        if rank == 0:
            with results.open("a") as file:
                file.write(json.dumps(found.to_json()) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
