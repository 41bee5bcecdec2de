"""Bytes that each device of a plan needs: at most, and over time.

What one replica needs is in `penstock.simulate.stage_memory`. The peak depends on the order of
work alone, not on its times; only where forwards run beside backwards do times decide.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import KIND_CODES, Action
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.simulate.instances import Instances
from penstock.simulate.stage_memory import Held, Holding, StageMemory, most_bytes
from penstock.simulate.stage_work import StageWork
from penstock.simulate.trace import Span, Trace, spans_of_actions
from penstock.simulate.workload import DeviceWork, Workload
from penstock.timeline.timeline import MemorySample

__all__ = ["held_while", "memory_samples", "peaks_bytes"]

Whole: TypeAlias = npt.NDArray[np.int64]

F, B, W, R = (KIND_CODES[kind] for kind in ("F", "B", "W", "R"))


def held_while(schedule: Schedule, instances: Instances) -> tuple[tuple[Holding, ...], ...]:
    """For each device group what it holds while its actions run, without repetition.

    All that a peak needs of a schedule; what holds no more than another in any respect is left out.
    """
    return tuple(
        held_by_group(order, instances.numbers_in(order), members)
        for order, members in zip(schedule.orders, instances.members, strict=True)
    )


def held_by_group(order: Order, instance: Whole, members: tuple[int, ...]) -> tuple[Holding, ...]:
    """`held_while` of one device group that holds the instances ``members``."""
    kinds, works = order.kinds.astype(np.int64), np.searchsorted(np.array(members), instance)
    cells = order.micro_batches * np.int64(len(members)) + works
    recomputed = kinds == R
    again = np.isin(cells, cells[recomputed]) if recomputed.any() else recomputed
    columns: list[Whole] = []
    for place in range(len(members)):
        mine = works == place
        forward, recompute = mine & (kinds == F), mine & recomputed
        freed = np.cumsum(mine & ((kinds == B) | (kinds == W)))
        before = np.concatenate(([0], freed[:-1]))
        saved = np.cumsum((forward & ~again) | recompute) - before
        inputs = np.cumsum(forward & again) - np.cumsum(recompute)
        columns += [saved, inputs]
    states = undominated(np.stack([works, *columns], axis=1))
    return tuple(
        Holding(row[0], tuple(Held(*row[k : k + 2]) for k in range(1, len(row), 2)))
        for row in states.tolist()
    )


def undominated(states: Whole) -> Whole:
    """The different rows, but for those that another of the same first entry exceeds throughout."""
    kept: list[Whole] = []
    for place in np.unique(states[:, 0]).tolist():
        left = states[states[:, 0] == place]
        while len(left):
            # None exceeds the row with the largest sum.
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
    """The most bytes in use at once on each of the cluster's ``devices`` devices; 0 where unused.

    ``members`` are the instances of each device group, ``held`` is `held_while` of the schedule.
    """
    peaks = [0.0] * devices
    for instances, held_by in zip(members, held, strict=True):
        mine = [stages[instance] for instance in instances]
        for index, device in enumerate(mine[0].devices):
            memories = [stage.replicas[index].memory for stage in mine]
            peaks[device] = most_bytes(memories, held_by)
    return tuple(peaks)


def memory_samples(workload: Workload, trace: Trace) -> tuple[MemorySample, ...]:
    """Bytes in use on every device from each allocation and release on, sorted by time."""
    samples: list[MemorySample] = []
    for work, streams in spans_of_actions(workload, trace):
        samples += device_samples(workload, work, streams)
    return tuple(sorted(samples, key=lambda sample: sample.time_s))


def device_samples(
    workload: Workload,
    work: DeviceWork,
    streams: Sequence[tuple[Sequence[Action], Sequence[Span]]],
) -> list[MemorySample]:
    """The samples of one device, in order of time; of several at one time the last one holds."""
    memories = {i: replica.work.memory for i, replica in work.replicas.items()}
    recomputed = {
        (action.stage, action.micro_batch)
        for actions, _ in streams
        for action in actions
        if action.kind == "R"
    }
    held = dict.fromkeys(memories, Held())
    workspace_bytes = 0.0
    samples = [MemorySample(work.device, 0.0, bytes_of(memories, held))]
    for time_s, starts, action in in_time(streams):
        instance = workload.instances.of(in_iteration(action, workload))
        running_bytes = memories[instance].workspace_bytes
        if starts:
            again = (action.stage, action.micro_batch) in recomputed
            held[instance] = held[instance].after_start(action, again)
            workspace_bytes += running_bytes
        else:
            held[instance] = held[instance].after_end(action)
            workspace_bytes = max(0.0, workspace_bytes - running_bytes)
            if len(streams) == 1:
                workspace_bytes = 0.0
        level_bytes = bytes_of(memories, held) + workspace_bytes
        if samples[-1].bytes != level_bytes:
            samples.append(MemorySample(work.device, time_s, level_bytes))
    return samples


def in_iteration(action: Action, workload: Workload) -> Action:
    """The action as its schedule names it, in the first iteration."""
    number = action.micro_batch % workload.micro_batches_per_iteration
    return Action(action.kind, action.stage, number)


def in_time(
    streams: Sequence[tuple[Sequence[Action], Sequence[Span]]],
) -> list[tuple[float, bool, Action]]:
    """Starts and ends of actions in order of time; of several streams at one time, ends first."""
    moments = [
        moment
        for actions, spans in streams
        for action, (start_s, end_s) in zip(actions, spans, strict=True)
        for moment in ((start_s, True, action), (end_s, False, action))
    ]
    if len(streams) > 1:
        moments.sort(key=lambda moment: moment[:2])
    return moments


def bytes_of(memories: dict[int, StageMemory], held: dict[int, Held]) -> float:
    """Bytes of all replicas of a device while nothing runs."""
    return sum(memory.at(held[instance]) for instance, memory in memories.items())
