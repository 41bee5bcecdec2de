"""Bytes that each device of a plan needs: at most, and over time.

What one replica needs is in `penstock.simulate.stage_memory`. The peak depends on the order of
work alone, not on its times.
"""

from collections.abc import Sequence

from penstock.schedule.action import Action
from penstock.schedule.schedule import Schedule
from penstock.simulate.stage_memory import Held, StageMemory
from penstock.simulate.stage_work import StageWork
from penstock.simulate.trace import Span, Trace, first_actions
from penstock.simulate.workload import Workload
from penstock.timeline.timeline import MemorySample

__all__ = ["held_while", "memory_samples", "peaks_bytes"]


def recomputed_work(order: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Stage and micro-batch of every recompute in an order."""
    return frozenset((action.stage, action.micro_batch) for action in order if action.kind == "R")


def held_while(schedule: Schedule, stages: int) -> tuple[tuple[Held, ...], ...]:
    """For each stage every different `Held` at which one of its actions runs, without repetition.

    All that a peak needs of a schedule.
    """
    found: list[set[Held]] = [set() for _ in range(stages)]
    for order in schedule.orders:
        recomputed = recomputed_work(order)
        held = [Held()] * stages
        for action in order:
            again = (action.stage, action.micro_batch) in recomputed
            now = held[action.stage].after_start(action, again)
            found[action.stage].add(now)
            held[action.stage] = now.after_end(action)
    return tuple(tuple(sorted(stage)) for stage in found)


def peaks_bytes(
    stages: Sequence[StageWork], held: Sequence[Sequence[Held]], devices: int
) -> tuple[float, ...]:
    """The most bytes in use at once on each of the cluster's ``devices`` devices; 0 where unused.

    ``held`` is `held_while` of the plan's schedule.
    """
    peaks = [0.0] * devices
    for stage, held_by_stage in zip(stages, held, strict=True):
        for device, replica in zip(stage.devices, stage.replicas, strict=True):
            peaks[device] = replica.memory.peak(held_by_stage)
    return tuple(peaks)


def memory_samples(workload: Workload, trace: Trace) -> tuple[MemorySample, ...]:
    """Bytes in use on every device from each allocation and release on, sorted by time."""
    samples: list[MemorySample] = []
    for work, first in zip(workload.devices, first_actions(workload), strict=True):
        order = workload.schedule.of(work.stage)
        spans = trace.actions[first : first + len(order)]
        samples += device_samples(work.device, work.replica.memory, order, spans)
    return tuple(sorted(samples, key=lambda sample: sample.time_s))


def device_samples(
    device: int,
    memory: StageMemory,
    order: Sequence[Action],
    spans: Sequence[Span],
) -> list[MemorySample]:
    """The samples of one device, in order of time; of several at one time the last one holds."""
    recomputed = recomputed_work(order)
    held = Held()
    levels: list[tuple[float, float]] = [(0.0, memory.at(held))]
    for action, (start_s, end_s) in zip(order, spans, strict=True):
        again = (action.stage, action.micro_batch) in recomputed
        held = held.after_start(action, again)
        levels.append((start_s, memory.at(held) + memory.workspace_bytes))
        held = held.after_end(action)
        levels.append((end_s, memory.at(held)))
    samples: list[MemorySample] = []
    for time_s, level_bytes in levels:
        if samples and samples[-1].bytes == level_bytes:
            continue
        samples.append(MemorySample(device, time_s, level_bytes))
    return samples
