"""The lengths of a job's batches: which dimensions vary, how they are distributed, what must fit.

Batches are put in groups of about the same length. Times are means over the groups, each of which
is measured at its own length. Saved bytes are those of the longest batch, since a plan that fits it
fits all others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import log
from statistics import median
from typing import Any

from penstock.capture.batch.found_lengths import find_dynamic
from penstock.capture.batch.layout import RowsOf, layout_of
from penstock.capture.batch.lengths import Dynamic, LengthsOf, named_lengths
from penstock.capture.contract import Batch
from penstock.errors import BadInput
from penstock.profile.model_profile import Affine, Edge, LengthCosts, ModelProfile
from penstock.report.record import MeasuredLength
from penstock.simulate.by_length import LengthPrediction
from penstock.train.job import Job

LOOKED_AT = 64
"""The number of first batches from which the distribution of lengths is estimated."""

MOST_GROUPS = 4
"""The most groups: every one is measured separately, which takes time."""


@dataclass(frozen=True)
class LengthGroup:
    """Batches of about the same length: a typical one, its lengths, and their share of all."""

    batch: Batch
    lengths: LengthsOf
    share: float


@dataclass(frozen=True)
class DataLengths:
    """The lengths of a job's data; ``groups`` are in order from short to long.

    ``typical`` is the batch that is nearest to the mean length.
    """

    dynamic: Dynamic
    names: tuple[str, ...]
    groups: tuple[LengthGroup, ...]
    typical: LengthGroup
    longest: LengthGroup
    batches: int

    def __str__(self) -> str:
        measured = "; ".join(
            f"{lengths_text(self.names, group.lengths)} for {100 * group.share:.0f} %"
            for group in self.groups
        )
        return (
            f"times are means over the lengths of {self.batches} batches ({measured}), bytes of "
            f"{lengths_text(self.names, self.longest.lengths)} (the longest of them)"
        )


def data_lengths(job: Job) -> DataLengths | None:
    """The lengths of the first batches of a job with ``dynamic``; None if nothing varies."""
    batches = list(islice(job.batches("train"), LOOKED_AT))
    if not batches:
        raise BadInput(f"job '{job.name}': its data has no batch; it must yield one for each step")
    dynamic = find_dynamic(batches, job.rows) if job.dynamic == "auto" else job.dynamic
    if not dynamic:
        return None
    found = [lengths_of(batch, dynamic, job.rows, number) for number, batch in enumerate(batches)]
    mean = [sum(sizes) / len(found) for sizes in zip(*found, strict=True)]

    def relative(lengths: LengthsOf) -> float:
        return sum(size / usual for size, usual in zip(lengths, mean, strict=True))

    order = sorted(range(len(found)), key=lambda number: relative(found[number]))

    def group(numbers: Sequence[int]) -> LengthGroup:
        sizes = zip(*(found[number] for number in numbers), strict=True)
        middle = [sum(own) / len(numbers) for own in sizes]

        def from_middle(number: int) -> float:
            return sum(abs(n / usual - 1) for n, usual in zip(found[number], middle, strict=True))

        near = min(numbers, key=from_middle)
        return LengthGroup(batches[near], found[near], len(numbers) / len(found))

    return DataLengths(
        dynamic,
        tuple(length.name for length in named_lengths(dynamic)),
        tuple(map(group, grouped(order, found))),
        group(order),
        group(order[-1:]),
        len(found),
    )


def lengths_of(batch: Batch, dynamic: Dynamic, rows: RowsOf, number: int) -> LengthsOf:
    """The lengths of a batch of the data; ``number`` is used in error messages."""
    try:
        return layout_of(batch, dynamic, rows).example_lengths
    except BadInput as problem:
        raise BadInput(f"batch {number} of the training data: {problem}") from None


def grouped(order: Sequence[int], found: Sequence[LengthsOf]) -> list[list[int]]:
    """Groups of batches from short to long: one for each length if few, else of equal size."""
    by_lengths: dict[LengthsOf, list[int]] = {}
    for number in order:
        by_lengths.setdefault(found[number], []).append(number)
    if len(by_lengths) <= MOST_GROUPS:
        return list(by_lengths.values())
    ends = [len(order) * k // MOST_GROUPS for k in range(MOST_GROUPS + 1)]
    return [list(order[lo:hi]) for lo, hi in pairwise(ends)]


def lengths_text(names: Sequence[str], lengths: LengthsOf) -> str:
    """Lengths with their names, in words."""
    return ", ".join(f"{name} {size}" for name, size in zip(names, lengths, strict=True))


def measured_lengths(
    predicted: Sequence[LengthPrediction], rows: Iterable[Mapping[str, Any]], warm: int
) -> tuple[MeasuredLength, ...]:
    """The steps after step ``warm`` in ``rows``, assigned to the nearest predicted length.

    Steps of several batches have no length and are left out.
    """
    if not predicted:
        return ()
    found: list[list[float]] = [[] for _ in predicted]

    def distance(k: int, lengths: Mapping[str, int]) -> float:
        # On a log scale 8 and 32 are as far from 16.
        return sum(abs(log(lengths[name] / size)) for name, size in predicted[k].lengths)

    for row in rows:
        if "lengths" in row and row["step"] > warm:
            near = min(range(len(found)), key=lambda k: distance(k, row["lengths"]))
            found[near].append(row["iteration_s"])
    return tuple(
        MeasuredLength(
            dict(length.lengths),
            length.share,
            length.iteration_s,
            median(seconds) if seconds else 0.0,
            len(seconds),
        )
        for length, seconds in zip(predicted, found, strict=True)
    )


def mean_s(lengths: Sequence[MeasuredLength]) -> float:
    """The mean step time of the run in seconds; 0 if none was measured."""
    steps = sum(found.steps for found in lengths)
    return sum(found.steps * found.measured_s for found in lengths) / steps if steps else 0.0


def mean_profile(
    profiles: Sequence[tuple[Sequence[tuple[str, int]], float, ModelProfile]],
    longest: ModelProfile,
) -> ModelProfile:
    """The profile of a mixture; each of ``profiles`` is sizes by name, share, and profile.

    Seconds and bytes sent are means, weighted by the shares. Bytes saved are those of the longest
    batch, since a plan that fits it fits the others. The mean step time is the mean of the step
    times; means of layers give less unless one path is the longest at every length.
    """
    by_length = tuple(
        LengthCosts(tuple(lengths), share, profile.layers, profile.edges)
        for lengths, share, profile in profiles
    )
    shares = [share for _, share, _ in profiles]

    def mean(costs: Sequence[Affine]) -> Affine:
        pairs = zip(costs, shares, strict=True)
        return sum((cost.scaled(share) for cost, share in pairs), Affine())

    def edge(edges: Sequence[Edge]) -> Edge:
        return replace(
            edges[0],
            bytes=mean([edge.bytes for edge in edges]),
            gradient_bytes=mean([edge.gradient_bytes for edge in edges]),
        )

    edges = zip(*(costs.edges for costs in by_length), strict=True)
    return replace(
        longest,
        layers=tuple(
            at.with_seconds_of(own, mean)
            for at, *own in zip(longest.layers, *(one.layers for one in by_length), strict=True)
        ),
        edges=tuple(map(edge, edges)),
        by_length=by_length,
        tokens_per_sample=sum(share * one.tokens_per_sample for _, share, one in profiles),
        flops_per_sample=sum(share * one.flops_per_sample for _, share, one in profiles),
    )
