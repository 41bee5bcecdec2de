"""Watches, while a run trains, whether ranks and links are as fast as planned."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.timeline.drift import (
    Compared,
    Drift,
    Part,
    common_factor,
    compared,
    own_factors,
    steady_drifts,
)
from penstock.timeline.metrics import iteration_s
from penstock.timeline.timeline import Timeline

__all__ = ["STEADY_SAMPLES", "DriftWatch"]

STEADY_SAMPLES = 4
"""In so many measured iterations, one after another, a part must be slow."""


@dataclass
class DriftWatch:
    """Compares measured iterations of ``batches`` batches with the planned one.

    ``say`` is called once for each drift, when it is steady.
    """

    planned: Timeline
    batches: int
    say: Callable[[str], None]
    samples: deque[Compared] = field(default_factory=lambda: deque(maxlen=STEADY_SAMPLES))
    _said: set[Part] = field(default_factory=set[Part])

    def add(self, step: int, measured: Timeline) -> dict[str, float]:
        """Add the iteration of a step; returns how many times as long as planned each part took."""
        times = compared(self.planned, measured, self.batches)
        self.samples.append(times)
        for drift in self.drifts:
            if drift.part not in self._said:
                self._said.add(drift.part)
                self.say(f"step {step}: {drift}")
        factors = {str(part): factor for part, factor in own_factors(times).items()}
        return {"all_ranks": common_factor(times)} | factors

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """What has been slow in all of the latest samples."""
        if len(self.samples) < STEADY_SAMPLES:
            return ()
        return steady_drifts(self.samples, iteration_s(self.planned))
