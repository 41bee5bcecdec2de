"""How long ranks take to join and to open their transport; docs/benchmarks/runtime.md has a run.

    python benchmarks/runtime/start_up.py --ranks 16 64

The ranks are processes of this machine that talk over Gloo, each with its two neighbours in a ring.
"""

import argparse
import json
import os
import time
from pathlib import Path

from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.processes.world import join_world
from penstock.runtime.transport.process_groups import GroupTransport

TIMEOUT_S = 300.0


def started(pairs: list[tuple[int, int]]) -> dict[str, float]:
    """Run by each rank: its seconds, groups, handles, and memory that no other process has."""
    start_s = time.perf_counter()
    world = join_world("cpu", TIMEOUT_S)
    joined_s = time.perf_counter()
    transport = GroupTransport(world, pairs)
    world.barrier()
    opened_s = time.perf_counter()
    memory = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = [int(line.split()[1]) for line in memory if line.startswith("Private_")]
    found = {
        "join_s": joined_s - start_s,
        "open_s": opened_s - joined_s,
        # The default group is the world's too.
        "groups": 1 + len(world.groups),
        "handles": len(os.listdir("/proc/self/fd")),
        "private_bytes": 1024.0 * sum(private),
    }
    world.barrier()
    transport.close()
    world.leave()
    return found


def main() -> None:
    """Start each number of ranks and print the largest figures of a rank."""
    options = argparse.ArgumentParser(description="Start ranks that talk over Gloo.")
    options.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    for ranks in options.parse_args().ranks:
        ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        pairs = [*ring, *((receiver, sender) for sender, receiver in ring)]
        found = launch_workers(started, (pairs,), workers=ranks, threads=1)
        print(json.dumps({"ranks": ranks} | {k: max(r[k] for r in found) for k in found[0]}))


if __name__ == "__main__":
    main()
