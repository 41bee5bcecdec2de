"""`--ranks`: NCCL itself, on all GPUs of this host; written for whoever has them.

The ranks are started here, with torchrun's variables, and each takes a GPU of its own.
"""

from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist
from judged_ranks import FAILURES, ends_with_the_cause, here, judged, launched, pipeline
from rows import Row, Setting, told, under
from runtime.matrix_plans import torchrun_cases

from penstock.errors import BadInput
from penstock.measure.links import measure_links
from penstock.plan.plan import Plan, Stage

FIRST_STEP_S = 60.0
"""Limit of making communicators, warming up and a first step together."""

MICRO_BATCHES = 16


def several_gpus(setting: Setting) -> Iterator[Row]:
    """The first step, every kind of schedule, links, bubble; then ranks that fail."""
    seen = torch.cuda.device_count()
    ranks = min(seen, 4)
    if ranks < 2:
        raise BadInput(f"this host shows {seen} GPU; messages by NCCL need two")
    given = (ranks, setting.stand_in)
    found = launched(joined, given, ranks)
    backends = {backend for backend, _, _ in found}
    yield under("3", f"backends but NCCL ({', '.join(backends)})", len(backends - {"nccl"}), 0)
    slowest_s = max(seconds for _, seconds, _ in found)
    yield under("3", "seconds of the first step, communicators made", slowest_s, FIRST_STEP_S, "s")
    taken = max(size for _, _, size in found)
    yield told("3", "memory that communicators and context take", f"{taken / 1e6:.0f} MB")
    cases = list(torchrun_cases(ranks, "process-groups"))[:: 5 if setting.small else 1]
    yield from judged(f"on {ranks} GPUs", cases, ranks, setting, "cuda")
    for text in launched(linked, (setting.stand_in,), ranks)[0]:
        yield told("3", "link", text)
    bubbles = launched(stepped, given, ranks)[0]
    ideal = (ranks - 1) / (MICRO_BATCHES + ranks - 1)
    yield told("3", "bubble of 1f1b", f"{median(bubbles):.2f} (of equal stages {ideal:.2f})")
    for failure in FAILURES:
        row = ends_with_the_cause(failure, setting, "cuda")
        # A receive makes the host of a stand-in wait, where NCCL's makes only the GPU wait.
        yield setting.by_device(row) if failure == "is stopped" else row


def chain(ranks: int) -> Plan:
    """Seven layers over this number of ranks."""
    ends = [round(7 * n / ranks) for n in range(ranks + 1)]
    stages = (Stage(range(ends[n], ends[n + 1]), (n,), (1,)) for n in range(ranks))
    return Plan(tuple(stages), MICRO_BATCHES, 1, "1f1b")


def joined(ranks: int, stand_in: bool) -> tuple[str, float, int]:
    """The backend, the seconds of a first step, and the memory beside tensors, of this rank."""
    from time import perf_counter

    device = here(stand_in, "cuda")
    free = torch.cuda.mem_get_info()[0]
    start_s = perf_counter()
    pipe, batch = pipeline(chain(ranks), device)
    with pipe:
        pipe.step(batch)
        torch.cuda.synchronize()
        taken_s = perf_counter() - start_s
        taken = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        return pipe._world.backend, taken_s, taken


def linked(stand_in: bool) -> list[str]:
    """The host's links as they were measured."""
    device = torch.device(here(stand_in, "cuda"))
    dist.init_process_group("nccl", device_id=None if stand_in else device)
    return [
        f"{host.link_bytes_per_s / 1e9:.1f} GB/s between {len(host.devices)} GPUs"
        for host in measure_links(device).hosts
    ]


def stepped(ranks: int, stand_in: bool) -> list[float]:
    """The bubbles of a few steps."""
    pipe, batch = pipeline(chain(ranks), here(stand_in, "cuda"))
    with pipe:
        return [pipe.step(batch).bubble for _ in range(5)]
