"""Drift of a measured iteration from the planned one: slow ranks and slow links.

Both timelines are read in the same way. A stage's time on a device is the time of its actions. A
message's time is visible only if its receiver waited for it: from the start of the send to the end
of the receipt.

All compute times may be longer than planned by a common factor, since the profile was measured
elsewhere or cores are shared. It is the lower median over stages and devices. Only what is longer
than that makes a straggler.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Literal, NamedTuple, TypeAlias

from penstock.text import seconds_text
from penstock.timeline.metrics import COMPUTE, iteration_s
from penstock.timeline.timeline import Event, Timeline

LEAST_FACTOR = 1.5
"""A stage or link that takes less than its planned time times this factor is no drift."""

LEAST_SHARE = 0.05
"""Neither is one that adds less than this share of the planned iteration."""


class Part(NamedTuple):
    """A stage on a device (``first``, ``second``), or the link from one device to another."""

    kind: Literal["stage", "link"]
    first: int
    second: int

    def __str__(self) -> str:
        if self.kind == "stage":
            return f"stage_{self.first}_rank_{self.second}"
        return f"link_{self.first}_to_{self.second}"


class Times(NamedTuple):
    """Planned and measured seconds of an iteration."""

    planned_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        """Its time as a multiple of the planned one."""
        return self.measured_s / self.planned_s


Compared: TypeAlias = Mapping[Part, Times]
"""The times of all parts that both timelines show."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A part that steadily takes ``factor`` times as long as planned (`own_factors`)."""

    part: Part
    times: Times
    factor: float

    def __str__(self) -> str:
        kind, first, second = self.part
        planned_s, measured_s = map(seconds_text, self.times)
        spent = f"{measured_s} a step (planned: {planned_s}), {self.factor:.3g} times as"
        if kind == "link":
            return f"the link from rank {first} to rank {second} is slow: {spent} long as planned"
        return f"stage {first} on rank {second} is a straggler: {spent} slow as the other ranks"


def common_factor(times: Compared) -> float:
    """The factor that the compute times of all devices have in common; 1 without any."""
    return median_low([t.factor for part, t in times.items() if part.kind == "stage"] or [1.0])


def own_factors(times: Compared) -> dict[Part, float]:
    """Each part's time as a multiple of the planned one; stages beyond the common factor."""
    common = common_factor(times)
    return {part: t.factor / (common if part.kind == "stage" else 1.0) for part, t in times.items()}


def part_seconds(timeline: Timeline) -> dict[Part, float]:
    """Seconds of an iteration that each stage takes on each device, and each link if visible."""
    found: dict[Part, float] = defaultdict(float)
    sent: dict[tuple[int, int], list[Event]] = defaultdict(list)
    received: dict[tuple[int, int], list[Event]] = defaultdict(list)
    ends: dict[int, list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.kind == "SEND":
            sent[event.device, event.peer].append(event)
        elif event.kind == "RECV":
            received[event.peer, event.device].append(event)
        elif event.kind in COMPUTE and event.kind != "STEP":
            found[Part("stage", event.stage, event.device)] += event.end_s - event.start_s
            ends[event.device].append(event.end_s)
    for link, events in sent.items():
        # Messages of a link arrive in the order in which they were sent.
        if len(events) == len(received[link]):
            visible = visible_seconds(events, received[link], ends[link[1]])
            if visible:
                found[Part("link", *link)] = median(visible) * len(events)
    return dict(found)


def visible_seconds(
    sent: Sequence[Event], received: Sequence[Event], ends: Sequence[float]
) -> list[float]:
    """Seconds of the messages for which the receiver waited; its actions end at ``ends``."""
    found: list[float] = []
    for begin, end in zip(sent, received, strict=True):
        before = [s for s in ends if s <= end.end_s]
        if not before or max(before) <= begin.start_s:
            found.append(end.end_s - begin.start_s)
    return found


STEADY_SAMPLES = 4
"""Measured iterations, one after another, in which a part must be slow."""


@dataclass
class DriftWatch:
    """Compares measured iterations of ``batches`` batches with the planned one."""

    planned: Timeline
    batches: int
    samples: deque[Compared] = field(
        default_factory=partial(deque[Compared], maxlen=STEADY_SAMPLES)
    )

    def add(self, measured: Timeline) -> dict[str, float]:
        """Add an iteration; returns how many times as long as planned each part took."""
        expected, found = part_seconds(self.planned), part_seconds(measured)
        times = {
            part: Times(seconds, found[part] / self.batches)
            for part, seconds in expected.items()
            if part in found and seconds > 0
        }
        self.samples.append(times)
        factors = {str(part): factor for part, factor in own_factors(times).items()}
        return {"all_ranks": common_factor(times)} | factors

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """Parts that have been slow in all of the latest samples, the slowest first."""
        if len(self.samples) < STEADY_SAMPLES:
            return ()
        found: list[Drift] = []
        own, least_s = [*map(own_factors, self.samples)], LEAST_SHARE * iteration_s(self.planned)
        for part in set(self.samples[0]).intersection(*self.samples):
            times = [sample[part] for sample in self.samples]
            factors = [factors_of[part] for factors_of in own]
            excess_s = min(t.measured_s * (1 - 1 / f) for t, f in zip(times, factors, strict=True))
            if min(factors) >= LEAST_FACTOR and excess_s >= least_s:
                middle = Times(times[0].planned_s, median(t.measured_s for t in times))
                found.append(Drift(part, middle, median(factors)))
        return tuple(sorted(found, key=lambda drift: (-drift.factor, drift.part)))
