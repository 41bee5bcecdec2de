"""Predictions for batches of different lengths: each length is simulated by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.files import Json
from penstock.profile.model_profile import ModelProfile
from penstock.text import seconds_text


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Seconds of an iteration on batches of about one length, and the share of such batches."""

    lengths: tuple[tuple[str, int], ...]
    share: float
    iteration_s: float

    def __str__(self) -> str:
        named = ", ".join(f"{name} {size}" for name, size in self.lengths)
        return f"{named}: {seconds_text(self.iteration_s)}"

    def to_json(self) -> dict[str, Json]:
        """The entry in the JSON output of commands."""
        return {
            "lengths": dict(self.lengths),
            "share": self.share,
            "iteration_s": self.iteration_s,
        }


def predict_lengths(
    profile: ModelProfile, iteration_s: Callable[[ModelProfile], float]
) -> tuple[LengthPrediction, ...]:
    """``iteration_s`` for each length of a profile; empty if it has only one."""
    return tuple(
        LengthPrediction(costs.lengths, costs.share, iteration_s(profile.at(costs)))
        for costs in profile.by_length
    )


def expected_s(predictions: Sequence[LengthPrediction]) -> float:
    """The mean iteration time over all batches, in seconds."""
    return sum(found.share * found.iteration_s for found in predictions)
