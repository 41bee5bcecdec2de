"""The most bytes that a rank's tensors took, measured while a step runs.

Counted is what torch's allocators hand out, to the byte: on CUDA by their own statistics, on the
CPU by the profiler, which sees each allocation and each release of a step. The resident memory of
the process would say less: it holds the libraries, the C library keeps what is freed, and pages
stay that are not in use. So the figure is that of the simulator, which knows tensors only.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.runtime.rank import Worker
from penstock.runtime.steps.overlapped import OverlappedTraining
from penstock.runtime.steps.training import Training

__all__ = ["MeasuredMemory", "lasting_tensors", "measured_memory", "storage_bytes"]


@dataclass
class MeasuredMemory:
    """What was found, once the measurement has ended.

    ``peak_bytes``: the most bytes at once; ``held_bytes``: those that stay from step to step
    (parameters, gradients, buffers, the optimizer's state). 0 where nothing could be measured.
    """

    peak_bytes: float = 0.0
    held_bytes: float = 0.0


@contextmanager
def measured_memory(
    device: torch.device, held: Callable[[], Iterable[torch.Tensor]]
) -> Iterator[MeasuredMemory]:
    """Measure what runs within, on this thread; ``held`` are the tensors that stay.

    On the CPU the peak is that of the held tensors and of all that is allocated within. What was
    allocated before and is none of the held (the batch, a whole model that was captured) does not
    count. Take a step before, so that the optimizer has its state.
    """
    found = MeasuredMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.held_bytes = float(storage_bytes(held()))
        found.peak_bytes = float(torch.cuda.max_memory_allocated(device))
        return
    before = storage_bytes(held())
    # The profiler writes a line at each start and stop unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    found.held_bytes = float(storage_bytes(held()))
    most = most_allocated(profiler)
    if most is not None:
        found.peak_bytes = float(before + most)


def lasting_tensors(
    worker: Worker, training: Training, overlapped: OverlappedTraining | None = None
) -> Iterator[torch.Tensor]:
    """What a rank holds between steps: parameters, gradients, buffers, the optimizer's state.

    Also the copies that are kept to undo a step.
    """
    for tensor in worker.held.held_tensors().values():
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    yield from training.tensors().values()
    if overlapped is not None:
        yield from overlapped.copies


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes behind ``tensors``, each storage once.

    >>> x = torch.zeros(4, 4)
    >>> storage_bytes([x, x[0], torch.zeros(2)])
    72
    """
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def most_allocated(profiler: Any) -> int | None:
    """The most bytes at once that were allocated since the profiler began; ``None``: unknown."""
    try:
        roots = profiler.profiler.kineto_results.experimental_event_tree()
        # Private: of what torch has, only its profiler sees the allocations of the CPU.
        internals: Any = torch._C
        allocation = internals._profiler._EventType.Allocation
    except (AttributeError, RuntimeError):
        return None
    most, pending = 0, list(roots)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == allocation and event.extra_fields.device.type == "cpu":
            most = max(most, event.extra_fields.total_allocated)
    return most
