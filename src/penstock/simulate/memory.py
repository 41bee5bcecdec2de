"""Bytes in use on each device of a plan: the peak, and over time.

`penstock.simulate.stage_memory` says what one replica needs. The peak depends only on the order of
work, not on its times, unless forwards run beside backwards.
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

Whole: TypeAlias = npt.NDArray[np.int64]

F, B, W, R = (KIND_CODES[kind] for kind in ("F", "B", "W", "R"))


def held_while(schedule: Schedule, instances: Instances) -> tuple[tuple[Holding, ...], ...]:
    """For each device group, the distinct states of memory while its actions run.

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
        Holding(row[0], tuple(Held(*row[k : k + 2]) for k in range(1, len(row), 2)))
        for row in states.tolist()
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
        for index, device in enumerate(mine[0].devices):
            memories = [stage.replicas[index].memory for stage in mine]
            peaks[device] = most_bytes(memories, held_by)
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
    held = dict.fromkeys(memories, Held())
    workspace_bytes = 0.0
    samples = [MemorySample(work.device, 0.0, bytes_of(memories, held))]
    for time_s, starts, action in in_time(streams):
        instance = workload.instances.of(in_iteration(action, workload))
        running_bytes = memories[instance].workspace_bytes
        if starts:
            is_recomputed = (action.stage, action.micro_batch) in recomputed
            held[instance] = held[instance].after_start(action, is_recomputed)
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
    """The same action of the first iteration, which is what the schedule names."""
    number = action.micro_batch % workload.micro_batches_per_iteration
    return Action(action.kind, action.stage, number)


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


def bytes_of(memories: dict[int, StageMemory], held: dict[int, Held]) -> float:
    """Bytes of all replicas on a device while nothing runs."""
    return sum(memory.at(held[instance]) for instance, memory in memories.items())
