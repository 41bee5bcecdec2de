"""Schedules with split backwards from a pattern of F and I; W are put into the gaps."""

from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.schedule.action import KIND_CODES
from penstock.schedule.clock import seconds_by_kind, transfers_s
from penstock.schedule.fitting import check_room
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import ROUNDING, PipelineShape
from penstock.schedule.timetable import schedule_of_groups

Slots: TypeAlias = npt.NDArray[np.int64]
"""Integers: slots of a pattern, or actions, ``(kind * stages + stage) * micro_batches + m``."""

ROWS = [KIND_CODES["F"], KIND_CODES["I"], KIND_CODES["W"]]

LATENESS = (0.25, 0.5, 0.75)
"""Delays of what follows that a W may cause, as fractions of the shortest W."""


class Rearrangement(NamedTuple):
    """One rearrangement of the pattern of a V.

    F of the stages on the way up get a rank ``up`` slots later than in the pattern, and I of the
    stages on the way down one ``down`` slots later; earlier if negative. A stage on the way down
    may have ``deeper`` more micro-batches between F and I than in the pattern. A ``patient`` group
    starts no W that would end after an arrival that is already known.
    """

    up: int = 0
    down: int = 0
    deeper: int = 0
    patient: bool = False


@dataclass(frozen=True)
class Pattern:
    """A schedule as papers draw it, in slots and without W.

    ``slots[0, stage, m]`` and ``slots[1, stage, m]`` are the slots of F and I of micro-batch ``m``;
    only their order on a device group counts. A group holds at most ``most`` micro-batches, of all
    its stages together, until their W have run. Each of the ``rearrangements`` is tried.
    """

    slots: Slots
    most: int
    rearrangements: tuple[Rearrangement, ...] = ()


def schedule_of_pattern(shape: PipelineShape, pattern: Pattern) -> Schedule:
    """The pattern with every W where it delays nothing, in the fastest order that was found.

    The order of the pattern is tried first. If it does not reach the lower bound, its
    rearrangements are tried: they fill gaps that unequal costs, the warm-up and the drain leave.
    The fastest order wins, and the pattern wins ties. Last, W may also go into gaps that are
    slightly too short. No group holds more than in the pattern, or than the shape allows. The time
    is O(n log n) for n actions.
    """
    check_room(shape)
    drawn = drawing_of(shape, pattern)
    orders = [drawn.order]
    best, best_s = with_weights(drawn, drawn.order, lateness=0.0)
    for change in pattern.rearrangements:
        if best_s <= drawn.bound_s:
            break
        other = rearrangement(drawn, change)
        found, found_s = with_weights(drawn, other, lateness=0.0)
        if found_s + drawn.slack_s < best_s:
            orders[1:], best, best_s = [other], found, found_s
    # If all actions take the same time, no gap is slightly too short.
    for order, lateness in product(orders, LATENESS if np.ptp(drawn.seconds) > 0 else ()):
        if best_s <= drawn.bound_s:
            break
        found, found_s = with_weights(drawn, order, lateness)
        if found_s + drawn.slack_s < best_s:
            best, best_s = found, found_s
    return decoded(drawn, best)


@dataclass(frozen=True)
class PlacedPattern:
    """A pattern on a pipeline, with its costs and limits as the core takes them.

    ``order`` has the actions group after group, those of ``group`` from ``first[group]`` on, in the
    order of the pattern. ``seconds`` are those of F, I and W. No order takes less than ``bound_s``.
    Times that differ by less than ``slack_s`` count as equal.
    """

    shape: PipelineShape
    pattern: Pattern
    first: list[int]
    order: Slots
    seconds: npt.NDArray[np.float64]
    slack_s: float
    bound_s: float
    pipe: native.IdealPipe
    limits: native.HeldLimits


def drawing_of(shape: PipelineShape, pattern: Pattern) -> PlacedPattern:
    """A pattern with a pipeline's costs and limits; all groups hold equally many stages."""
    home = [shape.group_of(s) for s in range(shape.stages)]
    table = seconds_by_kind(shape)
    seconds = table[ROWS]
    again_s = np.array([shape.recomputes(s) for s in range(shape.stages)]) * seconds[0]
    transfer_s = np.append(transfers_s(shape), 0.0)
    # A lower bound: a group does all its work, and only after its first input has arrived.
    work_s = np.bincount(home, weights=seconds.sum(axis=0) + again_s) * shape.micro_batches
    arrives_s = np.concatenate([[0.0], np.cumsum(seconds[0] + transfer_s)])
    seconds[1] += again_s
    table[ROWS] = seconds
    slots = pattern.slots.ravel() - pattern.slots.min()
    # One number sorts by group, then slot.
    group_of_action = np.tile(np.repeat(home, shape.micro_batches), 2)
    order = np.argsort(group_of_action * (slots.max() + 1) + slots, kind="stable")
    cells = shape.stages * shape.micro_batches
    costs = [shape.cost(stage) for stage in range(shape.stages)]
    slack_s = 1e-9 * float(seconds.max())
    return PlacedPattern(
        shape,
        pattern,
        first=[g * (len(order) // shape.groups) for g in range(shape.groups + 1)],
        order=np.where(order < cells, order, order + (ROWS[1] - 1) * cells),
        seconds=seconds,
        slack_s=slack_s,
        bound_s=float(np.max(arrives_s[: shape.groups] + work_s)) + slack_s,
        pipe=native.IdealPipe(shape.stages, shape.micro_batches, table, transfer_s),
        limits=native.HeldLimits(
            pattern.most,
            home,
            [shape.limit(stage) for stage in range(shape.stages)],
            [cost.saved_bytes for cost in costs],
            [cost.bytes_until_weight_backward for cost in costs],
            [room * ROUNDING for room in shape.memory_bytes or (inf,) * shape.groups],
        ),
    )


def with_weights(drawn: PlacedPattern, actions: Slots, lateness: float) -> tuple[Slots, float]:
    """These orders with W in their gaps, and their makespan: infinite if they exceed a limit."""
    out = np.zeros(3 * len(actions) // 2, dtype=np.int64)
    slack_s = drawn.slack_s + lateness * float(drawn.seconds[2].min())
    return out, native.fill_gaps(drawn.pipe, drawn.limits, drawn.first, actions, slack_s, out)


def rearrangement(drawn: PlacedPattern, change: Rearrangement) -> Slots:
    """Orders of F and I that the core makes from the pattern (``rearrange`` in ideal_play.hpp)."""
    slots = drawn.pattern.slots.copy()
    slots[0, drawn.shape.groups :] += change.up
    slots[1, : drawn.shape.groups] += change.down
    deepest = np.minimum(depths(drawn) + change.deeper, drawn.pattern.most - 1).tolist()
    ranks = slots.reshape(2, -1)
    out = np.zeros(len(drawn.order), dtype=np.int64)
    native.rearrange(drawn.pipe, drawn.limits, ranks, deepest, change.patient, drawn.slack_s, out)
    return out


def depths(drawn: PlacedPattern) -> Slots:
    """The most micro-batches between F and I on the downward stage of each group, as drawn."""
    stages, micro_batches = drawn.shape.stages, drawn.shape.micro_batches
    down = drawn.order // micro_batches % stages < drawn.shape.groups
    changes = np.where(drawn.order < stages * micro_batches, 1, -1) * down
    return np.cumsum(changes.reshape(drawn.shape.groups, -1), axis=1).max(axis=1)


def decoded(drawn: PlacedPattern, actions: Slots) -> Schedule:
    """The schedule with these orders, with R inserted where needed."""
    shape = drawn.shape
    kinds, cells = np.divmod(actions, shape.stages * shape.micro_batches)
    stages, micro_batches = np.divmod(cells, shape.micro_batches)
    ends = [3 * first // 2 for first in drawn.first[1:]]
    return schedule_of_groups(kinds, stages, micro_batches, ends, shape)
