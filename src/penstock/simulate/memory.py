"""Bytes that each device needs: by formula for planners, over time for people.

    device = parameters + gradients + optimizer state + buffers            all the time
           + saved bytes of its slice, for every micro-batch in flight     F (or R) to B (or W)
           + workspace of its largest layer                                while it computes

A stage that recomputes keeps only its inputs from F to R, and everything (which holds the inputs)
from R to B; where the backward follows its forward directly there is no R and everything is kept
at once. The peak
depends on the order of work alone, not on its times. Buffers of messages on their way are not
counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.action import Action
from penstock.schedule.schedule import PipelineShape, Schedule
from penstock.simulate.layer_sums import LayerSums, layer_sums
from penstock.simulate.trace import Span, Trace, first_actions
from penstock.simulate.workload import Workload
from penstock.timeline.timeline import MemorySample

__all__ = ["Held", "StageMemory", "held_while", "memory_samples", "peaks_bytes", "stage_memory"]


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """Micro-batches that a stage holds: with everything saved, and with their inputs only."""

    saved: int = 0
    inputs: int = 0

    def after_start(self, action: Action, recomputed: bool) -> "Held":
        """What is held while ``action`` runs: room is taken when it starts."""
        match action.kind:
            case "F" if recomputed:
                return Held(self.saved, self.inputs + 1)
            case "F":
                return Held(self.saved + 1, self.inputs)
            case "R":
                return Held(self.saved + 1, self.inputs - 1)
            case "B" | "I" | "W":
                return self

    def after_end(self, action: Action) -> "Held":
        """What is held once ``action`` has ended: a backward, or its second half, frees."""
        match action.kind:
            case "B" | "W":
                return Held(self.saved - 1, self.inputs)
            case "F" | "R" | "I":
                return self


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one replica of one stage."""

    fixed_bytes: float
    saved_bytes: float
    input_bytes: float
    workspace_bytes: float

    def at(self, held: Held) -> float:
        """Bytes while nothing runs."""
        return self.fixed_bytes + held.saved * self.saved_bytes + held.inputs * self.input_bytes


def recomputed_work(order: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Stage and micro-batch of every recompute in an order."""
    return frozenset((action.stage, action.micro_batch) for action in order if action.kind == "R")


def held_while(schedule: Schedule, shape: PipelineShape) -> tuple[tuple[Held, ...], ...]:
    """For each stage every different `Held` at which one of its actions runs, without repetition.

    All that a peak needs of a schedule, so it is found once for many plans of one shape.
    """
    found: list[set[Held]] = [set() for _ in range(shape.stages)]
    for order in schedule.orders:
        recomputed = recomputed_work(order)
        held = [Held()] * shape.stages
        for action in order:
            again = (action.stage, action.micro_batch) in recomputed
            now = held[action.stage].after_start(action, again)
            found[action.stage].add(now)
            held[action.stage] = now.after_end(action)
    return tuple(tuple(sorted(stage)) for stage in found)


def stage_memory(
    plan: Plan,
    profile: ModelProfile,
    stage: int,
    rows: int,
    optimizer_bytes_per_parameter_byte: float,
    sums: LayerSums,
) -> StageMemory:
    """The bytes of a replica of ``stage`` that computes ``rows`` rows of every micro-batch.

    Parameters count twice for their gradients, and once more for each byte that the optimizer
    keeps of them. Inputs are the tensors received, the batch itself stays on every rank anyway.
    """
    layers = plan.stages[stage].layers
    parameters = profile.parameter_bytes(layers)
    recompute = plan.stages[stage].recompute
    inputs = profile.incoming(layers) if recompute else ()
    return StageMemory(
        fixed_bytes=parameters * (2 + optimizer_bytes_per_parameter_byte)
        + sum(profile.layers[i].buffer_bytes for i in layers),
        saved_bytes=sums.saved_bytes.of(layers, rows),
        input_bytes=sum(edge.bytes.at(rows) for edge in inputs),
        workspace_bytes=max(profile.layers[i].workspace_bytes.at(rows) for i in layers),
    )


def peaks_bytes(
    plan: Plan,
    profile: ModelProfile,
    held: Sequence[Sequence[Held]],
    devices: int,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    sums: LayerSums | None = None,
) -> tuple[float, ...]:
    """The most bytes in use at once on each of the cluster's ``devices`` devices; 0 where unused.

    ``held`` is `held_while` of the plan's schedule.
    """
    sums = sums or layer_sums(profile)
    peaks = [0.0] * devices
    for index, stage in enumerate(plan.stages):
        for device, rows in zip(stage.devices, stage.slices, strict=True):
            memory = stage_memory(
                plan, profile, index, rows, optimizer_bytes_per_parameter_byte, sums
            )
            most = max(memory.at(now) for now in held[index])
            peaks[device] = most + memory.workspace_bytes
    return tuple(peaks)


def memory_samples(
    plan: Plan,
    profile: ModelProfile,
    workload: Workload,
    trace: Trace,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
) -> tuple[MemorySample, ...]:
    """Bytes in use on every device from each allocation and release on, sorted by time."""
    sums = layer_sums(profile)
    samples: list[MemorySample] = []
    for position, first in enumerate(first_actions(workload)):
        work = workload.devices[position]
        order = workload.schedule.of(work.stage)
        stage = plan.stages[work.stage]
        rows = stage.slices[stage.devices.index(work.device)]
        memory = stage_memory(
            plan, profile, work.stage, rows, optimizer_bytes_per_parameter_byte, sums
        )
        spans = trace.actions[first : first + len(order)]
        samples += device_samples(work.device, memory, order, spans)
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
