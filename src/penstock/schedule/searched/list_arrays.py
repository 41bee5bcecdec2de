"""A pipeline as the arrays that `list_loop` works on, with its limits checked."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import BadInput
from penstock.schedule.clock import transfers_s
from penstock.schedule.searched.list_loop import ScheduleArrays
from penstock.schedule.shape import PipelineShape

__all__ = ["arrays_of", "quick_bound_s"]

Numbers: TypeAlias = npt.NDArray[np.float64]


def arrays_of(shape: PipelineShape, *, split: bool) -> ScheduleArrays:
    """The arrays of ``shape``; ``split``: backwards are I and W instead of whole.

    Raises:
        BadInput: one micro-batch exceeds a group's memory or a stage's limit.
    """
    directions = 2 if shape.mirrored else 1
    costs = [shape.cost(stage) for stage in range(shape.stages)] * directions
    group = np.array(
        [
            shape.group_of(stage, direction)
            for direction in range(directions)
            for stage in range(shape.stages)
        ]
    )
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
    rows = 3 if split else 2
    actions = rows * np.bincount(group, micro_batches, shape.groups).astype(np.int64)
    return ScheduleArrays(
        shape.stages,
        directions,
        split,
        len(group),
        -(-shape.micro_batches // directions),
        np.searchsorted(np.sort(group), np.arange(shape.groups + 1)),
        np.argsort(group, kind="stable"),
        group,
        direction,
        micro_batches,
        limits_of(shape, group, micro_batches),
        seconds,
        np.where(recompute, forward_s, 0.0),
        np.tile(np.append(transfers_s(shape), 0.0), directions),
        # Where W needs more than F saved, the difference is reserved from the forward on.
        np.maximum(saved_bytes, kept_bytes),
        np.ascontiguousarray(kept_bytes),
        rooms_of(shape, group, micro_batches, np.maximum(saved_bytes, kept_bytes)),
        work_s,
        np.cumsum(actions) - actions,
    )


def limits_of(
    shape: PipelineShape, group: npt.NDArray[np.int64], micro_batches: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
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
            f"micro-batch{' for each direction' if shape.mirrored else ''}"
        )
    return limits


def rooms_of(
    shape: PipelineShape,
    group: npt.NDArray[np.int64],
    micro_batches: npt.NDArray[np.int64],
    saved_bytes: Numbers,
) -> Numbers:
    """The bytes that each group may save; infinite without a limit."""
    if not shape.memory_bytes:
        return np.full(shape.groups, np.inf)
    limit_bytes = np.array(shape.memory_bytes, dtype=np.float64)
    directions = len(group) // shape.stages
    for direction in range(directions):
        mine = np.arange(len(group)) // shape.stages == direction
        needed_bytes = np.zeros(shape.groups)
        np.add.at(needed_bytes, group[mine], (saved_bytes * (micro_batches > 0))[mine])
        for short in np.flatnonzero(needed_bytes > limit_bytes * (1 + 1e-10)).tolist():
            raise BadInput(
                f"one micro-batch saves {needed_bytes[short]:.6g} bytes on the stages of device "
                f"group {short}, which has room for {limit_bytes[short]:.6g}; use smaller "
                f"micro-batches, recompute, or more stages"
            )
    # Sums are rounded; the tolerance of `validate` is ten times as large.
    return limit_bytes * (1 + 1e-10)


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
        own = arrays.members[arrays.first_of_group[g] : arrays.first_of_group[g + 1]]
        first_s, last_s = head_s[own % stages].min(), tail_s[own % stages].min()
        weights_s = (arrays.micro_batches * arrays.seconds[2])[own].sum()
        without_s = arrays.work_s[g] - weights_s + last_s
        bound_s = max(bound_s, float(first_s + max(arrays.work_s[g], without_s)))
    return bound_s


def sums_before(values: Numbers | Sequence[float]) -> Numbers:
    """For each entry the sum of those before it."""
    return np.concatenate([[0.0], np.cumsum(values)[:-1]])
