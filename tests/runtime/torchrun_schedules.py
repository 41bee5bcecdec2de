"""Started by torchrun: trains under several schedules, and prints what differs from one process.

PYTHONPATH=tests torchrun --nproc-per-node 4 tests/runtime/torchrun_schedules.py process-groups
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from runtime.matrix_cases import play
from runtime.matrix_plans import torchrun_cases

from penstock.runtime.processes.world import host_identity


def main(transports: list[str]) -> None:
    """Play all cases; rank 0 prints what is wrong on any rank, and where the ranks were."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    cases = [case for transport in transports for case in torchrun_cases(ranks, transport)]
    found = play(cases)
    everywhere: list[tuple[str, dict[str, list[str]]]] = [("", {})] * ranks
    own = (host_identity(), {str(case): wrong for case, wrong in found.items()})
    dist.all_gather_object(everywhere, own)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "ranks": ranks,
                    "hosts": len({host for host, _ in everywhere}),
                    "cases": [len(wrong) for _, wrong in everywhere],
                    "wrong": [
                        f"rank {rank}: {case}: {what}"
                        for rank, (_, wrong) in enumerate(everywhere)
                        for case, found in wrong.items()
                        for what in found
                    ],
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
