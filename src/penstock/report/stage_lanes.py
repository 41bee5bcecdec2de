"""A timeline as bars in one lane for each stage, with a bounded number of lanes and bars.

Stages that share their devices share a lane.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

import numpy as np
import numpy.typing as npt

from penstock.plan.plan import Plan
from penstock.report.device_stages import stage_names, stages_by_device
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Event, EventKind, Timeline

__all__ = ["Bar", "StageLane", "stage_lanes"]

MOST_LANES = 32
"""In longer pipelines a lane shows several stages."""

MOST_BARS = 400
"""Lanes with more events are drawn as columns; each shows the kind that fills most of it."""

COLUMNS = 900

STRENGTHS = 4
"""Number of levels that show how busy a column is."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a lane does during a time; ``strength`` is the busy fraction of that time."""

    kind: EventKind
    start_s: float
    end_s: float
    micro_batch: int = -1
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class StageLane:
    """One stage, or several neighbouring ones: what its busiest replica computes and sends.

    ``name`` lists the stages; stages that share devices need not be neighbours.
    """

    name: str
    first_stage: int
    last_stage: int
    replicas: int
    compute: tuple[Bar, ...]
    transfers: tuple[Bar, ...]


def stage_lanes(timeline: Timeline, plan: Plan) -> tuple[StageLane, ...]:
    """A lane for each device group of ``plan``, or for several neighbouring groups if many."""
    held, groups = stages_by_device(plan), plan.device_groups
    per_lane = ceil(len(groups) / MOST_LANES)
    end_s = max((event.end_s for event in timeline.events), default=0.0)
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        by_device[event.device].append(event)
    lanes: list[StageLane] = []
    for first in range(0, len(groups), per_lane):
        chosen = groups[first : first + per_lane]
        stages = sorted({stage for group in chosen for stage in held[group[0]]})
        shown = [busiest([by_device[device] for device in group]) for group in chosen]
        compute = [[e for e in events if e.kind in COMPUTE] for events in shown]
        transfers = [[e for e in events if e.kind not in COMPUTE] for events in shown]
        lanes.append(
            StageLane(
                lane_name(stages, per_lane),
                stages[0],
                stages[-1],
                len(chosen[0]),
                bars_of(compute, end_s),
                bars_of(transfers, end_s),
            )
        )
    return tuple(lanes)


def lane_name(stages: Sequence[int], per_lane: int) -> str:
    """The stages of a lane in words; a range if several device groups share the lane.

    >>> lane_name([4, 5, 6], per_lane=3), lane_name([0, 4], per_lane=1)
    ('stages 4-6', 'stages 0, 4')
    """
    is_run = list(stages) == list(range(stages[0], stages[-1] + 1))
    if per_lane > 1 and is_run and len(stages) > 1:
        return f"stages {stages[0]}-{stages[-1]}"
    return stage_names(stages, most=20)


def busiest(replicas: Sequence[list[Event]]) -> list[Event]:
    """The events of the replica that computes longest."""
    return max(
        replicas, key=lambda events: sum(e.end_s - e.start_s for e in events if e.kind in COMPUTE)
    )


def bars_of(rows: Sequence[list[Event]], end_s: float) -> tuple[Bar, ...]:
    """The events of one device as bars if there are few, otherwise columns."""
    if len(rows) == 1 and len(rows[0]) <= MOST_BARS:
        return tuple(Bar(e.kind, e.start_s, e.end_s, e.micro_batch) for e in rows[0])
    if end_s <= 0 or not any(rows):
        return ()
    return column_bars(rows, end_s)


def column_bars(rows: Sequence[list[Event]], end_s: float) -> tuple[Bar, ...]:
    """Bars of consecutive columns with the same main kind and strength."""
    kinds: list[EventKind] = sorted({event.kind for events in rows for event in events})
    edges_s = np.linspace(0.0, end_s, COLUMNS + 1)
    busy = np.stack([busy_shares(rows, kind, edges_s) for kind in kinds])
    leading = busy.argmax(axis=0)
    strength = np.ceil(np.minimum(busy.sum(axis=0), 1.0) * STRENGTHS - 1e-6) / STRENGTHS
    bars: list[Bar] = []
    for (kind, level), run in groupby(
        range(COLUMNS), key=lambda c: (int(leading[c]), float(strength[c]))
    ):
        columns = list(run)
        if level > 0:
            start_s, until_s = float(edges_s[columns[0]]), float(edges_s[columns[-1] + 1])
            bars.append(Bar(kinds[kind], start_s, until_s, strength=level))
    return tuple(bars)


def busy_shares(
    rows: Sequence[list[Event]], kind: EventKind, edges_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """For each column the fraction of time in which ``rows`` do ``kind``, averaged over rows."""
    total_s = np.zeros(len(edges_s) - 1)
    for events in rows:
        spans = sorted((e.start_s, e.end_s) for e in events if e.kind == kind)
        if spans:
            times = np.array(spans).reshape(-1)
            lengths = np.diff(times, prepend=times[0])
            lengths[2::2] = 0.0  # between two events
            total_s += np.diff(np.interp(edges_s, times, np.cumsum(lengths)))
    return total_s / (len(rows) * np.diff(edges_s))
