"""Compares predicted and measured step times by the length of the batch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from statistics import median
from typing import Any

from penstock.simulate.by_length import LengthPrediction

__all__ = ["MeasuredLength", "mean_s", "measured_lengths"]


@dataclass(frozen=True, slots=True)
class MeasuredLength:
    """Batches of about these lengths: their share of the data, predicted and measured seconds.

    ``measured_s`` is the median over ``steps`` steps; 0 if no step had such a batch.
    """

    lengths: Mapping[str, int]
    share: float
    predicted_s: float
    measured_s: float
    steps: int

    def to_json(self) -> dict[str, Any]:
        """The entry of ``summary.json``."""
        return asdict(self)

    def __str__(self) -> str:
        named = ", ".join(f"{name} {size}" for name, size in self.lengths.items())
        predicted = f"{named}: predicted {1000 * self.predicted_s:.1f} ms"
        if not self.steps:
            return f"{predicted}, no such step"
        error = 100 * (self.predicted_s / self.measured_s - 1)
        measured = f"measured {1000 * self.measured_s:.1f} ms over {self.steps} steps"
        return f"{predicted}, {measured} ({error:+.1f} %)"


def measured_lengths(
    predicted: Sequence[LengthPrediction], rows: Iterable[Mapping[str, Any]], warm: int
) -> tuple[MeasuredLength, ...]:
    """The steps after step ``warm`` in ``rows``, assigned to the nearest predicted length.

    Steps of several batches have no length and are left out.
    """
    if not predicted:
        return ()
    found: list[list[float]] = [[] for _ in predicted]
    for row in rows:
        if "lengths" in row and row["step"] > warm:
            near = min(range(len(found)), key=lambda k: apart(predicted[k], row["lengths"]))
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


def apart(length: LengthPrediction, lengths: Mapping[str, int]) -> float:
    """Distance between lengths and predicted ones, on a log scale: 8 and 32 are as far from 16."""
    return sum(abs(log(lengths[name] / size)) for name, size in length.lengths)


def mean_s(lengths: Sequence[MeasuredLength]) -> float:
    """The mean step time of the run in seconds; 0 if none was measured."""
    steps = sum(found.steps for found in lengths)
    return sum(found.steps * found.measured_s for found in lengths) / steps if steps else 0.0
