"""The lengths of a job's batches: of which one a plan is made, and which one must fit.

time      that of a batch of about the mean length: a run's mean step takes about as long
bytes     those of the longest batch: a plan that holds it holds the others
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from penstock.capture.batch_layout import layout_of
from penstock.capture.layer_graph import Batch
from penstock.capture.lengths import LengthsOf, name_of
from penstock.errors import BadInput
from penstock.jobs.job import Job
from penstock.profile.model_profile import ModelProfile

__all__ = ["DataLengths", "data_lengths", "profile_of_lengths"]

LOOKED_AT = 64
"""So many batches of the data tell how its lengths are distributed."""


@dataclass(frozen=True)
class DataLengths:
    """A batch near the mean length of the data, and the longest; each with its lengths."""

    names: tuple[str, ...]
    typical: Batch
    longest: Batch
    typical_lengths: LengthsOf
    longest_lengths: LengthsOf
    batches: int

    def __str__(self) -> str:
        return (
            f"timed at {told(self.names, self.typical_lengths)} (near the mean of {self.batches} "
            f"batches), bytes of {told(self.names, self.longest_lengths)} (the longest of them)"
        )


def data_lengths(job: Job) -> DataLengths:
    """The typical and the longest of the first batches of a job's training data.

    Raises:
        BadInput: there is no batch, or one that does not vary as declared.
    """
    batches = list(islice(job.batches("train"), LOOKED_AT))
    if not batches:
        raise BadInput(f"job '{job.name}': its data has no batch; it must yield one for each step")
    found = [layout_of(batch, job.dynamic).example_lengths for batch in batches]
    mean = [sum(sizes) / len(found) for sizes in zip(*found, strict=True)]

    def distance(number: int) -> float:
        return sum(abs(size / usual - 1) for size, usual in zip(found[number], mean, strict=True))

    def work(number: int) -> float:
        return sum(size / usual for size, usual in zip(found[number], mean, strict=True))

    near, far = min(range(len(found)), key=distance), max(range(len(found)), key=work)
    names = dict.fromkeys(name_of(n) for d in job.dynamic.values() for n in d.values())
    return DataLengths(
        tuple(names), batches[near], batches[far], found[near], found[far], len(found)
    )


def profile_of_lengths(
    lengths: DataLengths, profile_of: Callable[[Batch], ModelProfile]
) -> ModelProfile:
    """The times of the typical batch, with the bytes of the longest."""
    usual, largest = profile_of(lengths.typical), profile_of(lengths.longest)
    layers = tuple(
        replace(own, saved_bytes=at_most.saved_bytes, workspace_bytes=at_most.workspace_bytes)
        for own, at_most in zip(usual.layers, largest.layers, strict=True)
    )
    return replace(usual, layers=layers, source=f"{usual.source}; {lengths}")


def told(names: Sequence[str], lengths: LengthsOf) -> str:
    """Lengths by name."""
    return ", ".join(f"{name} {size}" for name, size in zip(names, lengths, strict=True))
