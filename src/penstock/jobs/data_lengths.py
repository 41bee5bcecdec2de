"""The lengths of a job's batches: which dimensions vary, how they are distributed, what must fit.

Batches are put in groups of about the same length. Times are means over the groups, each of which
is measured at its own length. Saved bytes are those of the longest batch, since a plan that fits it
fits all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from penstock.capture.batch_layout import layout_of
from penstock.capture.bucket_graph import MOST_CAPTURES
from penstock.capture.found_lengths import find_dynamic
from penstock.capture.layer_graph import Batch
from penstock.capture.lengths import Dynamic, Length, LengthsOf, named_lengths
from penstock.errors import BadInput
from penstock.jobs.job import Job

__all__ = ["DataLengths", "LengthGroup", "data_lengths"]

LOOKED_AT = 64
"""The first batches of the data, from which the distribution of lengths is estimated."""

MOST_GROUPS = 4
"""Every group is measured separately, which takes time."""

MOST_BUCKETS = 8
"""Every bucket is captured separately, which takes time."""


@dataclass(frozen=True)
class LengthGroup:
    """Batches of about the same length: a typical one, its lengths, and their share of all."""

    batch: Batch
    lengths: LengthsOf
    share: float


@dataclass(frozen=True)
class DataLengths:
    """The lengths of a job's data; ``groups`` are in order from short to long.

    ``dynamic`` has buckets for every length; they are used if a model cannot be captured without
    them. ``typical`` is the batch that is nearest to the mean length.
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
    """The lengths of the first batches of a job's training data; None if nothing varies.

    Raises:
        BadInput: there is no batch, or a batch does not vary as declared.
    """
    if not job.dynamic:
        return None
    batches = list(islice(job.batches("train"), LOOKED_AT))
    if not batches:
        raise BadInput(f"job '{job.name}': its data has no batch; it must yield one for each step")
    dynamic = find_dynamic(batches) if job.dynamic == "auto" else job.dynamic
    if not dynamic:
        return None
    found = [lengths_of(batch, dynamic, number) for number, batch in enumerate(batches)]
    mean = [sum(sizes) / len(found) for sizes in zip(*found, strict=True)]
    order = sorted(range(len(found)), key=lambda number: relative(found[number], mean))

    def group(numbers: Sequence[int]) -> LengthGroup:
        sizes = zip(*(found[number] for number in numbers), strict=True)
        middle = [sum(own) / len(numbers) for own in sizes]
        near = min(numbers, key=lambda number: distance(found[number], middle))
        return LengthGroup(batches[near], found[near], len(numbers) / len(found))

    return DataLengths(
        with_buckets(dynamic, found),
        tuple(length.name for length in named_lengths(dynamic)),
        tuple(map(group, grouped(order, found))),
        group(order),
        group(order[-1:]),
        len(found),
    )


def lengths_of(batch: Batch, dynamic: Dynamic, number: int) -> LengthsOf:
    """The lengths of a batch of the data; ``number`` is used in error messages."""
    try:
        return layout_of(batch, dynamic).example_lengths
    except BadInput as problem:
        raise BadInput(f"batch {number} of the training data: {problem}") from None


def relative(lengths: LengthsOf, mean: Sequence[float]) -> float:
    """How long a batch is relative to the mean, summed over all lengths."""
    return sum(size / usual for size, usual in zip(lengths, mean, strict=True))


def distance(lengths: LengthsOf, middle: Sequence[float]) -> float:
    """The relative distance between a batch's lengths and ``middle``."""
    return sum(abs(size / usual - 1) for size, usual in zip(lengths, middle, strict=True))


def grouped(order: Sequence[int], found: Sequence[LengthsOf]) -> list[list[int]]:
    """Groups of batches from short to long: one for each length if few, else of equal size."""
    by_lengths: dict[LengthsOf, list[int]] = {}
    for number in order:
        by_lengths.setdefault(found[number], []).append(number)
    if len(by_lengths) <= MOST_GROUPS:
        return list(by_lengths.values())
    ends = [len(order) * k // MOST_GROUPS for k in range(MOST_GROUPS + 1)]
    return [list(order[lo:hi]) for lo, hi in pairwise(ends)]


def with_buckets(dynamic: Dynamic, found: Sequence[LengthsOf]) -> Dynamic:
    """``dynamic`` with buckets from the data for lengths that are declared without buckets."""
    lengths = named_lengths(dynamic)
    most = min(MOST_BUCKETS, int(MOST_CAPTURES ** (1 / len(lengths)) + 1e-9))
    declared = {
        length.name: length
        if length.buckets
        else replace(length, buckets=buckets_of(length, sorted(sizes), most))
        for length, sizes in zip(lengths, zip(*found, strict=True), strict=True)
    }
    return {
        key: {
            dim: replace(declared[named.name], pad=named.pad)
            if isinstance(named, Length)
            else declared[named]
            for dim, named in dimensions.items()
        }
        for key, dimensions in dynamic.items()
    }


def buckets_of(length: Length, sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """All sizes of the data if there are few, else sizes that divide the batches equally.

    The declared maximum is a bucket too, because later batches may be longer than those examined.

    >>> buckets_of(Length("length"), [4, 4, 5, 9], 3)
    (4, 5, 9)
    >>> buckets_of(Length("length", max=99), [1, 2, 3, 4, 5, 6, 7, 8], 3)
    (4, 8, 99)
    """
    longer = (length.max,) if length.max is not None and length.max > sizes[-1] else ()
    different, own = sorted(set(sizes)), most - len(longer)
    if len(different) > own:
        ends = [len(sizes) * (k + 1) // own - 1 for k in range(own)]
        different = sorted({sizes[end] for end in ends})
    return (*different, *longer)


def lengths_text(names: Sequence[str], lengths: LengthsOf) -> str:
    """Lengths with their names, in words."""
    return ", ".join(f"{name} {size}" for name, size in zip(names, lengths, strict=True))
