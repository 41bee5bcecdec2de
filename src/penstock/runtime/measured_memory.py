"""Measure the most bytes that a rank's tensors took while a step runs.

It counts exactly what torch's allocators hand out: on a GPU by their statistics, on the CPU by the
profiler, which sees each allocation and each release. The resident memory of the process is less
exact: it includes libraries, freed memory that the C library keeps, and unused pages. The result
can be compared with the simulator's, which counts only tensors.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.device import (
    begin_peak,
    bytes_of_all_processes,
    is_gpu,
    peak_bytes,
    reserved_peak_bytes,
)
from penstock.runtime.engine import Engine
from penstock.runtime.update.training import Training
from penstock.text import size_text
from penstock.torch_internals import allocation_event


@dataclass
class MeasuredMemory:
    """The result of a measurement, filled in when it ends.

    ``peak_bytes`` is the most bytes at once. ``held_bytes`` is what stays from step to step:
    parameters, gradients, buffers, the optimizer's state. Both are 0 if nothing could be measured.
    On a GPU ``reserved_bytes`` is the most that torch took for tensors, with what they left unused,
    and ``in_use_bytes`` what all processes held at the end, by the driver: contexts and libraries
    count there alone.
    """

    peak_bytes: float = 0.0
    held_bytes: float = 0.0
    reserved_bytes: float = 0.0
    in_use_bytes: float = 0.0

    def __str__(self) -> str:
        """Describe what a GPU's memory held."""
        return (
            f"tensors {size_text(self.peak_bytes)}, taken by torch "
            f"{size_text(self.reserved_bytes)}, by all processes on the GPU "
            f"{size_text(self.in_use_bytes)}"
        )


@contextmanager
def measured_memory(
    device: torch.device, held: Callable[[], Iterable[torch.Tensor]]
) -> Iterator[MeasuredMemory]:
    """Measure the memory of what runs on this thread; ``held`` are the tensors that stay.

    On the CPU the peak counts the held tensors and all that is allocated within. Other tensors that
    were allocated before (the batch, a whole captured model) do not count. Take a step before, so
    that the optimizer has its state.
    """
    found = MeasuredMemory()
    if is_gpu(device):
        begin_peak(device)
        yield found
        found.held_bytes = float(distinct_bytes(held()))
        found.peak_bytes = float(peak_bytes(device))
        found.reserved_bytes = float(reserved_peak_bytes(device))
        found.in_use_bytes = float(bytes_of_all_processes(device))
        return
    before = distinct_bytes(held())
    # The profiler logs a line at each start and stop unless this is set.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # It runs once, so no events are cleared; torch 2.11 would warn that they are.
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        yield found
    found.held_bytes = float(distinct_bytes(held()))
    most = most_allocated(profiler)
    if most is not None:
        found.peak_bytes = float(before + most)


def lasting_tensors(engine: Engine, training: Training) -> Iterator[torch.Tensor]:
    """The tensors of a rank between steps: parameters, gradients, buffers, optimizer state."""
    for tensor in engine.held.held_tensors().values():
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    yield from (t for t in training.tensors().values() if t.device == engine.world.device)


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages of ``tensors``, each storage counted once.

    >>> x = torch.zeros(4, 4)
    >>> distinct_bytes([x, x[0], torch.zeros(2)])
    72
    """
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def most_allocated(profiler: Any) -> int | None:
    """The most bytes allocated at once since the profiler began; ``None`` if unknown."""
    try:
        roots = profiler.profiler.kineto_results.experimental_event_tree()
        allocation = allocation_event()
    except (AttributeError, RuntimeError):
        return None
    most, pending = 0, list(roots)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == allocation and event.extra_fields.device.type == "cpu":
            most = max(most, event.extra_fields.total_allocated)
    return most
