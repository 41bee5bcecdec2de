"""Bytes in use on each device of a plan: the peak, and over time.

    replica = parameters * versions + gradients + optimizer state + buffers   all the time
            + parameters in the autocast type                                 all the time
            + saved bytes of its slice, for every micro-batch in flight       F (or R) to B (or W)
            + workspace of its largest layer                                  while it computes
    device  = sum of its replicas at each moment

A stage that recomputes keeps only its inputs from F to R, and everything (including the inputs)
from R to B. If the backward directly follows its forward there is no R, and everything is kept at
once.

If only some layers are recomputed, the stage keeps from F to R what the other layers save, and each
tensor that passes between a recomputed layer and another one. That is too much by at most what the
other layers save of these tensors anyway.

A stage that recomputes by block keeps what its layers read, as if they saved that, and needs
what the largest layer saves beside it as workspace (`ModelProfile.by_block`).

What replicas divide is `held_bytes` of `core/costs.hpp`. Buffers of messages in transfer are
not counted. Without a flush several versions of the parameters are kept
(`penstock.schedule.weight_rule`), and each micro-batch keeps its own in the autocast type.

The peak depends only on the order of work, not on its times, unless forwards run beside backwards.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.native import Holding, StageWork, most_bytes
from penstock.schedule.action import KIND_CODES, Action
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.simulate.instances import Instances
from penstock.simulate.trace import Span, Trace, spans_of_actions
from penstock.simulate.workload import DeviceWork, Workload
from penstock.timeline.timeline import MemorySample

Whole: TypeAlias = npt.NDArray[np.int64]

F, B, W, R = (KIND_CODES[kind] for kind in ("F", "B", "W", "R"))


def held_while(schedule: Schedule, instances: Instances) -> tuple[tuple[Holding, ...], ...]:
    """The distinct states of memory while actions run, by device group.

    States that hold no more than another one in any respect are left out; the peak does not need
    them.
    """
    return tuple(
        held_by_group(order, instances.numbers_in(order), members)
        for order, members in zip(schedule.orders, instances.members, strict=True)
    )


def held_by_group(order: Order, instance: Whole, members: tuple[int, ...]) -> tuple[Holding, ...]:
    """`held_while` of a device group that holds the instances ``members``."""
    kinds, works = order.kinds.astype(np.int64), np.searchsorted(np.array(members), instance)
    cells = order.micro_batches * np.int64(len(members)) + works
    recomputed = kinds == R
    recomputes = np.isin(cells, cells[recomputed]) if recomputed.any() else recomputed
    columns: list[Whole] = []
    for place in range(len(members)):
        mine = works == place
        forward, recompute = mine & (kinds == F), mine & recomputed
        freed = np.cumsum(mine & ((kinds == B) | (kinds == W)))
        before = np.concatenate(([0], freed[:-1]))
        saved = np.cumsum((forward & ~recomputes) | recompute) - before
        inputs = np.cumsum(forward & recomputes) - np.cumsum(recompute)
        columns += [saved, inputs]
    states = undominated(np.stack([works, *columns], axis=1))
    return tuple(
        Holding(row[0], list(zip(row[1::2], row[2::2], strict=True))) for row in states.tolist()
    )


def undominated(states: Whole) -> Whole:
    """The distinct rows, without those that a row of the same first entry equals or exceeds."""
    kept: list[Whole] = []
    for place in np.unique(states[:, 0]).tolist():
        left = states[states[:, 0] == place]
        while len(left):
            # The row with the largest sum is not dominated.
            largest = left[np.argmax(left.sum(axis=1))]
            kept.append(largest)
            left = left[(left > largest).any(axis=1)]
    return np.array(sorted(map(tuple, kept)))


def peaks_bytes(
    stages: Sequence[StageWork],
    members: Sequence[Sequence[int]],
    held: Sequence[Sequence[Holding]],
    devices: int,
) -> tuple[float, ...]:
    """Peak bytes in use on each of the cluster's ``devices`` devices; 0 for unused ones.

    ``members`` are the instances of each device group; ``held`` is `held_while` of the schedule.
    """
    peaks = [0.0] * devices
    for instances, held_by in zip(members, held, strict=True):
        mine = [stages[instance] for instance in instances]
        replicas = zip(*(stage.replicas for stage in mine), strict=True)
        for device, own in zip(mine[0].devices, replicas, strict=True):
            peaks[device] = most_bytes([replica.memory for replica in own], held_by)
    return tuple(peaks)


def memory_samples(workload: Workload, trace: Trace) -> tuple[MemorySample, ...]:
    """Bytes in use on every device after each allocation and release, sorted by time."""
    samples: list[MemorySample] = []
    for work, streams in spans_of_actions(workload, trace):
        samples += device_samples(workload, work, streams)
    return tuple(sorted(samples, key=lambda sample: sample.time_s))


def device_samples(
    workload: Workload,
    work: DeviceWork,
    streams: Sequence[tuple[Sequence[Action], Sequence[Span]]],
) -> list[MemorySample]:
    """The samples of one device in order of time; of several at one time the last one counts."""
    memories = {i: replica.work.memory for i, replica in work.replicas.items()}
    recomputed = {
        (action.stage, action.micro_batch)
        for actions, _ in streams
        for action in actions
        if action.kind == "R"
    }
    # Micro-batches of each instance with everything saved, and with inputs only.
    saved, inputs = dict.fromkeys(memories, 0), dict.fromkeys(memories, 0)

    def resting_bytes() -> float:
        return sum(memory.at(saved[i], inputs[i]) for i, memory in memories.items())

    workspace_bytes = 0.0
    samples = [MemorySample(work.device, 0.0, resting_bytes())]
    for time_s, starts, action in in_time(streams):
        # The schedule names actions of the first iteration.
        number = action.micro_batch % workload.micro_batches_per_iteration
        instance = workload.instances.of(Action(action.kind, action.stage, number))
        running_bytes = memories[instance].workspace_bytes
        if starts:
            if action.kind == "F" and (action.stage, action.micro_batch) in recomputed:
                inputs[instance] += 1
            elif action.kind in ("F", "R"):
                saved[instance] += 1
                inputs[instance] -= action.kind == "R"
            workspace_bytes += running_bytes
        else:
            saved[instance] -= action.kind in ("B", "W")
            workspace_bytes = max(0.0, workspace_bytes - running_bytes)
            if len(streams) == 1:
                workspace_bytes = 0.0
        level_bytes = resting_bytes() + workspace_bytes
        if samples[-1].bytes != level_bytes:
            samples.append(MemorySample(work.device, time_s, level_bytes))
    return samples


def in_time(
    streams: Sequence[tuple[Sequence[Action], Sequence[Span]]],
) -> list[tuple[float, bool, Action]]:
    """Starts and ends of actions in order of time; at the same time, ends come first."""
    moments = [
        moment
        for actions, spans in streams
        for action, (start_s, end_s) in zip(actions, spans, strict=True)
        for moment in ((start_s, True, action), (end_s, False, action))
    ]
    if len(streams) > 1:
        moments.sort(key=lambda moment: moment[:2])
    return moments
