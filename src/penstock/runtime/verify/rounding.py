"""A second look before a step in low precision is called wrong: may it be rounding?

A sum in another order moves a number by its last place. Where a ReLU's input is that close to zero,
its gradient is then there or not, and a whole filter's differs by a percent. So the user's module
runs in float64: as it is, and then with every number moved at random by the rounding of float32.
Each tensor of the pipeline must be that of one of these runs, within the usual limit or twice the
largest distance at which the module's own tensors are from one. A gradient that is zero but for
rounding, as of a bias before a batch norm, is judged by others of its kind, or may be the rounding
of the largest gradient.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

import torch

from penstock.runtime.rank import Worker
from penstock.runtime.verify.own_module import OwnRun, Reference, in_double
from penstock.runtime.verify.result import (
    NOISE_SHARE,
    TOLERANCES,
    Difference,
    Values,
    VerifyResult,
    pairs_of,
)

__all__ = ["moved", "second_look"]

RUNS = 16
"""How often the module runs at most. A ReLU at zero changes sides in about every second run."""

MOVED_BY = 2.0**-22
"""The relative size of a move: that of a few sums in float32."""

ROOM = 2.0
"""How much farther than the module's own a tensor may be."""

IN_A_SUM = 16.0
"""Roundings of float32, in which sums are taken, that may add up in a gradient that is zero."""

MOST = 4.0
"""No tensor may be farther than this multiple of the usual limit."""


def second_look(
    worker: Worker,
    first: VerifyResult,
    found: Values,
    own: OwnRun | None,
    again: Callable[[int], Reference],
) -> VerifyResult:
    """``first``, or that everything is equal up to rounding; all ranks must call this.

    ``found`` are the pipeline's values and ``own`` the module's, on rank 0. ``again`` runs the
    module in float64, on numbers that are `moved` by a draw.
    """
    if first.equal or first.tolerance <= TOLERANCES[torch.float64]:
        return first
    ours, theirs, negligible = dict[str, float](), dict[str, float](), set[str]()
    for draw in range(RUNS):
        reference = again(draw)
        if reference.skipped:
            return first
        second: VerifyResult | None = None
        if reference.run is not None and own is not None:
            for nearest, values in ((ours, found), (theirs, own.values)):
                for pair in pairs_of(worker, values, reference.run.values):
                    nearest[pair.name] = min(nearest.get(pair.name, inf), pair.gap)
                    negligible |= {pair.name} if pair.is_negligible else set()
            second = explained(first, reference.name, ours, theirs, negligible)
        second = worker.world.from_first(second, VerifyResult, Difference)
        if second.equal:
            return second
    return first


def explained(
    first: VerifyResult,
    name: str,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    negligible: Collection[str],
) -> VerifyResult:
    """``first``, or its tensors as equal to ``name`` if rounding explains their distances."""
    usual = first.tolerance
    noise = ROOM * max(gap for n, gap in theirs.items() if n not in negligible)
    limit = max(usual, min(noise, MOST * usual))
    coarsest = next(dtype for dtype, known in TOLERANCES.items() if known == usual)
    summed = IN_A_SUM * torch.finfo(torch.float32).eps
    of_largest = max(torch.finfo(coarsest).eps, summed) / NOISE_SHARE
    small = max(usual, of_largest, *(ROOM * theirs[n] for n in negligible if n in theirs))
    if any(not gap <= (small if n in negligible else limit) for n, gap in ours.items()):
        return first
    largest = max(gap for n, gap in ours.items() if n not in negligible)
    return replace(first, largest=largest, tolerance=limit, difference=None, reference=name)


def moved(tensors: Sequence[torch.Tensor], draw: int) -> list[torch.Tensor]:
    """The tensors in float64, moved by rounding unless ``draw`` is 0."""
    generator = torch.Generator().manual_seed(draw)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        found = in_double(tensor)
        if not draw or not found.is_floating_point():
            return found
        signs = 2 * torch.randint(2, found.shape, generator=generator) - 1
        return found * (1 + MOVED_BY * signs.to(found.device))

    return [*map(one, tensors)]
