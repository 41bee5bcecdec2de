"""A pipeline as the arrays that the list schedulers work on, with its limits checked.

The core makes the orders, event by event; list_orders.hpp says why no policy can deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.errors import BadInput
from penstock.schedule.clock import transfers_s
from penstock.schedule.fitting import check_room
from penstock.schedule.shape import PipelineShape

Numbers: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

SLACK = 1 + 1e-10
"""Memory counts as so much larger, since sums are rounded; `validate` tolerates ten times that."""


@dataclass(frozen=True)
class ScheduleArrays:
    """A pipeline in arrays over *places*: stage ``s`` of direction ``w`` is ``w * stages + s``.

    ``seconds`` has a row for each kind of action: F, then I (or B if backwards are whole), then W.
    A place has at most ``indices`` micro-batches. ``work_s`` are those of each group.
    """

    stages: int
    directions: int
    split: bool
    groups: int
    indices: int
    group: Integers
    micro_batches: Integers
    seconds: Numbers
    transfer_s: Numbers
    work_s: Numbers
    pipe: native.ListPipe

    @property
    def actions(self) -> int:
        return (3 if self.split else 2) * int(self.micro_batches.sum())


class Wishes(NamedTuple):
    """A policy applied to a pipeline; `list_search.Policy` explains the fields.

    ``keys[row, q, i]`` ranks the ``i``-th action of a row on place ``q``; the least goes first.
    """

    keys: Numbers
    depth: Integers
    idle_price: float
    overlap: float
    most_pending: float
    weight_overlap: float
    forward_delay_s: float
    lead_s: float


def list_order(arrays: ScheduleArrays, wishes: Wishes, best_s: float) -> tuple[Integers, float]:
    """The order that ``wishes`` lead to, and its makespan in seconds.

    Actions are coded as ``(row * places + place) * indices + index``, group after group. The play
    stops as soon as it is certain to take ``best_s`` or longer; the makespan is then infinite and
    the order unfinished.
    """
    order = np.empty(arrays.actions, np.int64)
    keys, depth, *prices = wishes
    return order, native.list_order(arrays.pipe, keys, depth, prices, best_s, order)


def keys_of(arrays: ScheduleArrays, hops_s: Numbers, turn_s: float, shift_s: float) -> Numbers:
    """The keys of all actions, for micro-batches that enter every ``shift_s`` seconds.

    ``hops_s`` are the seconds from a stage to the next, on the first and second half of the stages,
    for forwards and then for backwards. ``turn_s`` pass between the last forward and the first
    backward.
    """
    stages, directions = arrays.stages, arrays.directions
    forward_s, back_s, _ = arrays.seconds[:, :stages]
    transfer_s = arrays.transfer_s[: stages - 1]
    late = (2 * np.arange(stages) >= stages).astype(np.int64)
    onward_s = np.maximum(hops_s[0, late[1:]], forward_s[:-1] + transfer_s)
    begin_s = np.append(0.0, np.cumsum(onward_s))
    return_s = np.maximum(hops_s[1, late[:-1]], back_s[1:] + transfer_s)
    turn_at_s = begin_s[-1] + forward_s[-1] + turn_s
    turned_s = turn_at_s + np.append(0.0, np.cumsum(return_s[::-1]))[::-1]
    later_s = (np.arange(directions)[:, None] + directions * np.arange(arrays.indices)) * shift_s
    later_s = np.repeat(later_s, stages, axis=0)
    keys = np.empty((3, *later_s.shape))
    keys[0] = np.tile(begin_s, directions)[:, None] + later_s
    keys[1] = np.tile(turned_s, directions)[:, None] + later_s
    keys[2] = keys[1] + arrays.seconds[1][:, None]
    return keys


def arrays_of(shape: PipelineShape, *, split: bool) -> ScheduleArrays:
    """The arrays of ``shape``; ``split``: backwards are I and W instead of whole."""
    directions = len(shape.ways)
    costs = [shape.cost(stage) for stage in range(shape.stages)] * directions
    group = np.array(shape.ways).ravel()
    direction = np.repeat(np.arange(directions), shape.stages)
    micro_batches = (shape.micro_batches - direction + directions - 1) // directions
    forward_s, input_s, weight_s, saved_bytes, kept_bytes = np.array(
        [
            (
                cost.forward_s,
                cost.input_backward_s,
                cost.weight_backward_s,
                cost.saved_bytes,
                cost.bytes_until_weight_backward,
            )
            for cost in costs
        ]
    ).T
    seconds = np.array([forward_s, input_s, weight_s])
    if not split:
        seconds[1:] = seconds[1] + seconds[2], np.zeros(len(group))
    work_s = np.zeros(shape.groups)
    np.add.at(work_s, group, micro_batches * seconds.sum(axis=0))
    recompute = np.array((shape.recompute or (False,) * shape.stages) * directions)
    transfer_s = np.tile(np.append(transfers_s(shape), 0.0), directions)
    # Where W needs more than F saved, the difference is reserved from the forward on.
    saved_bytes = np.maximum(saved_bytes, kept_bytes)
    check_room(shape, saved_bytes[: shape.stages].tolist(), SLACK)
    limits = limits_of(shape, group, micro_batches)
    rooms = np.array(shape.memory_bytes or (np.inf,) * shape.groups) * SLACK
    recompute_s = np.where(recompute, forward_s, 0.0)
    pipe = native.ListPipe(
        shape.stages,
        -(-shape.micro_batches // directions),
        split,
        np.array([group, micro_batches, limits]),
        np.array([*seconds, recompute_s, transfer_s, saved_bytes, kept_bytes]),
        rooms,
        work_s,
    )
    return ScheduleArrays(
        shape.stages,
        directions,
        split,
        shape.groups,
        -(-shape.micro_batches // directions),
        group,
        micro_batches,
        seconds,
        transfer_s,
        work_s,
        pipe,
    )


def limits_of(shape: PipelineShape, group: Integers, micro_batches: Integers) -> Integers:
    """The most micro-batches in flight on each place (see `ScheduleArrays`).

    If both directions of a mirrored stage are on the middle group, they share its limit.
    """
    limits = np.array([shape.limit(stage) for stage in range(shape.stages)])
    if shape.mirrored:
        here, back = np.split(group, 2)
        meets = (here == back) & (np.split(micro_batches, 2)[1] > 0)
        limits = np.concatenate(
            [np.where(meets, (limits + 1) // 2, limits), np.where(meets, limits // 2, limits)]
        )
    for place in np.flatnonzero((limits < 1) & (micro_batches > 0)).tolist():
        stage = place % shape.stages
        raise BadInput(
            f"stage {stage} has an in-flight limit of {shape.limit(stage)}; allow at least one "
            f"micro-batch for each direction"
        )
    return limits


def quick_bound_s(arrays: ScheduleArrays, shape: PipelineShape) -> float:
    """A quick lower bound on the makespan: each group's work, with its warm-up and drain.

    No action of a group starts before the first forward can reach it. After the last forward or
    backward of a group, gradients still travel to stage 0, whose W follows; after a W nothing needs
    to follow. The round trip of one micro-batch is another bound.
    """
    stages = shape.stages
    forward_s, back_s, weight_s = (row[:stages] for row in arrays.seconds)
    transfer_s = arrays.transfer_s[:stages]
    head_s = sums_before(forward_s + transfer_s)
    tail_s = sums_before(back_s + transfer_s) + weight_s[0]
    bound_s = float((forward_s + back_s + 2 * transfer_s).sum() + weight_s[0])
    for g in range(shape.groups):
        own = np.flatnonzero(arrays.group == g)
        first_s, last_s = head_s[own % stages].min(), tail_s[own % stages].min()
        weights_s = (arrays.micro_batches * arrays.seconds[2])[own].sum()
        without_s = arrays.work_s[g] - weights_s + last_s
        bound_s = max(bound_s, float(first_s + max(arrays.work_s[g], without_s)))
    return bound_s


def sums_before(values: Numbers | Sequence[float]) -> Numbers:
    """The sum of the entries before each one."""
    return np.concatenate([[0.0], np.cumsum(values)[:-1]])
