"""Estimates whether rank 0 has enough memory for the user's module, before anything is gathered."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.runtime.memory.free_memory import FreeMemory, free_memory
from penstock.runtime.rank import Worker
from penstock.words import size_text

__all__ = ["memory_for_reference"]


@dataclass(frozen=True)
class Need:
    """The memory needed at once in addition to what rank 0 holds: bytes by their purpose."""

    parts: tuple[tuple[str, float], ...]

    @property
    def bytes(self) -> float:
        """The total bytes."""
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        parts = (f"{name} {size_text(size)}" for name, size in self.parts)
        return f"{size_text(self.bytes)} more on rank 0 ({', '.join(parts)})"


def memory_for_reference(
    worker: Worker, batches: Sequence[Sequence[torch.Tensor]], *, double: bool = False
) -> str:
    """Why the reference does not fit on rank 0; empty if it may. All ranks must call this.

    The estimate is a lower bound: operators inside a layer may keep more than their results. A
    ``double`` reference is in float64, taken to be twice as large.
    """
    why = ""
    if worker.world.rank == 0:
        run, comparison = needs(worker, batches)
        share = 2.0 if double else 1.0
        device = worker.world.device
        host = [comparison] if device.type == "cuda" else [run, comparison]
        on_host = free_memory(torch.device("cpu"))
        tried = [(need, on_host) for need in host]
        if device.type == "cuda":
            tried.append((run, free_memory(device)))
        why = next(
            (refusal(need, free) for need, free in tried if share * need.bytes > free.bytes), ""
        )
    return worker.world.from_first(why)


def refusal(need: Need, free: FreeMemory) -> str:
    """The reason in one line, with sizes."""
    return (
        f"your module left whole needs at least {need}, where {size_text(free.bytes)} can be had "
        f"({free.limit}); compare a smaller model of its kind, or give rank 0 more memory"
    )


def needs(worker: Worker, batches: Sequence[Sequence[torch.Tensor]]) -> tuple[Need, Need]:
    """The memory to run the module, and then to compare its gradients with the pipeline's."""
    uses = worker.graph.parameter_uses
    others = sum(use.bytes for use in uses if 0 not in worker.held.holders.get(use.name, (0,)))
    divided = sum(use.bytes for use in uses if worker.tensor.dim_of(use.name) is not None)
    others += divided * (1 - 1 / len(worker.tensor.ranks))
    gradients = sum(use.bytes for use in uses if use.requires_grad and not use.is_buffer)
    kept = sum(activation_bytes(worker, leaves) for leaves in batches)
    own = (("gradients", gradients),)
    return (
        Need((("weights of other ranks", others), *own, ("activations", kept))),
        Need((*own, ("gradients of the pipeline", gradients))),
    )


def activation_bytes(worker: Worker, leaves: Sequence[torch.Tensor]) -> float:
    """The bytes kept for the backward: the tensors between layers that require gradients."""
    graph, autocast = worker.graph, worker.autocast_dtype
    lengths = graph.lengths_of(dict(enumerate(leaves)))
    total = 0.0
    for crossing, _, _ in graph.crossings:
        if crossing.requires_grad:
            spec = crossing.at(lengths)
            size = spec.dtype.itemsize
            share = min(size, autocast.itemsize) / size if autocast is not None else 1.0
            total += share * spec.bytes_for(leaves[0].shape[0])
    return total
