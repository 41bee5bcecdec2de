"""Rank processes that nobody stops when one of them fails, to see how each ends by itself."""

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import distributed

from penstock.runtime.processes.fork_server import ensure_fork_server


def run_ranks(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    ranks: int,
    directory: Path,
    limit_s: float,
    hanging: int = -1,
) -> tuple[dict[int, Any], dict[int, int | None]]:
    """Results by rank, of those that returned one, and exit codes; what still runs is killed.

    Exit code ``None``: it had not ended after ``limit_s``, or when all but rank ``hanging`` had.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ensure_fork_server(())
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=rank_main, args=(rank, ranks, store.port, function, arguments, directory)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    for rank, process in enumerate(processes):
        if rank != hanging:
            process.join(max(0.0, deadline - time.monotonic()))
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    for process in processes:
        process.kill()
        process.join()
    results = {
        rank: pickle.loads(path.read_bytes())
        for rank in range(ranks)
        if (path := directory / f"{rank}.pickle").exists()
    }
    return results, codes


def rank_main(
    rank: int,
    ranks: int,
    port: int,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    directory: Path,
) -> None:
    """What a rank's process runs: torchrun's variables, then the function."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    result = function(*arguments)
    partial = directory / f"{rank}.partial"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(directory / f"{rank}.pickle")
    # A peer that was killed leaves process groups that cannot be destroyed in peace.
    os._exit(0)
