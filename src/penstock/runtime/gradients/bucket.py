"""A gradient bucket: the gradients of some parameters in one flat tensor, summed together."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from penstock.cluster.collectives import BUCKET_BYTES

__all__ = [
    "GradientBucket",
    "GradientSum",
    "bucket_parts",
    "make_bucket",
    "place_gradients",
    "wide",
]


class GradientSum(Protocol):
    """Sums the gradients of a bucket over its holders, once in each iteration."""

    def start(self) -> None:
        """Start the sum: this rank's gradients are complete. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until the bucket holds the sum.

        Raises:
            Stalled: a holder did not take part in time.
            RunFailed: a holder failed or vanished.
        """
        ...

    def settle(self) -> None:
        """Wait until no other holder reads this rank's gradients any more.

        Raises:
            Stalled: a holder did not take part in time.
            RunFailed: a holder failed or vanished.
        """
        ...

    def close(self) -> None:
        """Stop sharing the bucket's memory with other ranks."""
        ...


@dataclass(eq=False)
class GradientBucket:
    """Parameters of one element type that the same ranks hold for the same stages.

    ``flat`` holds their gradients. ``expected`` is the number of gradients that arrive in an
    iteration, one for each stage of this rank that uses a parameter; ``missing`` of them have not
    arrived yet. ``owner`` is the holder that counts the gradients in norms. With sharded optimizer
    state only the owner gets the sums, and ``values`` holds the parameters' values. ``sum`` adds
    ``flat`` over the holders if there are several. ``stage`` is the first stage of this rank that
    uses the parameters.
    """

    holders: tuple[int, ...]
    stages: tuple[int, ...]
    owner: int
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    stage: int
    values: torch.Tensor | None = None
    expected: int = 0
    missing: int = 0
    sum: GradientSum | None = None
    started_s: float = 0.0

    def square(self, not_counted: Collection[torch.Tensor] = ()) -> torch.Tensor:
        """The sum of the squares of its gradients, in float64; without some parameters'."""
        parts = [self.flat]
        if not_counted:
            counted = [p.grad for p in self.parameters if p not in not_counted]
            parts = [gradient for gradient in counted if gradient is not None] or [self.flat[:0]]
        kind = wide(self.flat.dtype)
        norms = [torch.linalg.vector_norm(part, dtype=kind) for part in parts]
        return torch.stack(norms).double().square().sum()


def bucket_parts(
    parameters: Sequence[nn.Parameter], size_of: Callable[[nn.Parameter], float]
) -> Iterator[list[nn.Parameter]]:
    """Groups of parameters of one element type, each of about ``BUCKET_BYTES``."""
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        part: list[nn.Parameter] = []
        size = 0.0
        for parameter in (p for p in parameters if p.dtype == dtype):
            if part and size + size_of(parameter) > BUCKET_BYTES:
                yield part
                part, size = [], 0.0
            part.append(parameter)
            size += size_of(parameter)
        if part:
            yield part


def make_bucket(
    holders: tuple[int, ...],
    stages: tuple[int, ...],
    owner: int,
    parameters: list[nn.Parameter],
    stage: int,
) -> GradientBucket:
    """A bucket with new memory for its gradients."""
    total = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
    bucket = GradientBucket(holders, stages, owner, parameters, flat, stage)
    place_gradients(bucket, flat)
    return bucket


def place_gradients(bucket: GradientBucket, flat: torch.Tensor) -> None:
    """Make ``flat`` the bucket's memory, and the gradients of its parameters views into it."""
    bucket.flat = flat
    start = 0
    for parameter in bucket.parameters:
        stop = start + parameter.numel()
        parameter.grad = flat[start:stop].view(parameter.shape)
        start = stop


def wide(dtype: torch.dtype) -> torch.dtype:
    """The floating-point type for sums of many numbers of ``dtype``: at least 32 bits."""
    return dtype if dtype.itemsize >= 4 else torch.float32
