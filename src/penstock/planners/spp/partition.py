"""SPP's dynamic program over layers, stages and consecutive devices of an order (PRM)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from penstock.kernels import compiled
from penstock.plan.candidate import Candidate
from penstock.plan.cost import depth_function
from penstock.plan.plan import Plan, Stage
from penstock.plan.run_tables import Floats
from penstock.planners.spp.arrays import DeviceLine, Integers, ProfileArrays, WindowArrays
from penstock.planners.spp.graph import LinkArrays
from penstock.planners.spp.kernels import channel_s, extend, fits, stage_s

__all__ = ["PartitionTable", "partition"]

ALWAYS = 1
"""Number of the recompute choice "on" in the compiled loops."""


def partition(
    arrays: ProfileArrays,
    line: DeviceLine,
    links: LinkArrays,
    micro_batch_size: int,
    schedule: str,
    *,
    drains: bool = False,
) -> "PartitionTable":
    """The least workload of every number of stages on consecutive devices (SPP, PRM).

    ``W(k, lo, p, r)``: layers ``lo`` to the end as ``k`` stages, the first of them on the ``r``
    devices from ``p`` of the line, each other right behind the one before it:

        W(1, lo, p, r) = M * P + R
        W(k, lo, p, r) = min over end hi and next replicas r' of
                         max{ M * P + R,   M * X,   W(k - 1, hi, p + r, r') }

    ``P``: forward, backward and, where memory asks for it, recompute of a micro-batch on the
    slowest replica; ``R``: all-reduce and optimizer step; ``X``: the channel, activations down
    and gradients up; ``M``: micro-batches. The recurrence is the paper's, read from the last stage
    to the first, so that it is known how many micro-batches a stage keeps in flight: a stage
    that does not fit costs infinity. Costs are those of this project: ``P`` of whole rows and
    unequal devices, ``X`` by its busiest engine or port where the paper divides by ``r * r'`` and
    the slowest link. Devices at either end of the line may stay idle, where the paper uses all.

    Where a table ``drains``, a plan is judged by fill and drain as well:

        V(1, lo, p, r) = M * P + R
        V(k, lo, p, r) = min over end hi and next replicas r' of
                         max{ M * P + R,   M * Y,   P + X + V(k - 1, hi, p + r, r') }

    with ``Y`` the busier direction of the channel: a stage is busy for ``M * P`` between the fill
    and the drain of the stages before it, as in the warm-up and ending phases of DAPPLE (PPoPP
    2021). It is not the iteration time: an all-reduce is counted as if it held up the drain of the
    stages before, and skip tensors as if they passed through every stage.

    Exact for either objective, which tests hold against brute force.
    """
    problem = arrays.problem
    most_stages = min(line.blocks, arrays.layers, problem.max_stages or arrays.layers)
    micro_batches = problem.global_batch // micro_batch_size
    depth = depth_function(schedule)
    shape = (most_stages + 1, arrays.layers, line.blocks, len(line.widths))
    table = PartitionTable(
        arrays=arrays,
        line=line,
        links=links,
        windows=windows_of(arrays, line, micro_batch_size),
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        value=np.full(shape, inf),
        choice=np.full(shape, -1, dtype=np.int64),
        depths=np.array([0, *(depth(k, micro_batches) for k in range(1, most_stages + 1))]),
        drains=drains,
    )
    fill(table)
    return table


def windows_of(
    arrays: ProfileArrays, line: DeviceLine, micro_batch_size: int
) -> dict[tuple[int, int], WindowArrays]:
    """The windows of a line by position and number of their width."""
    return {
        (position, number): arrays.window(line.devices(position, width), micro_batch_size)
        for position in range(line.blocks)
        for number, width in enumerate(line.widths)
        if position + width <= line.blocks
    }


def fill(table: "PartitionTable") -> None:
    """Fill a table from the last window of the line to the first."""
    arrays, line, value = table.arrays, table.line, table.value
    shape = (value.shape[0], arrays.layers + 1, line.blocks + 1)
    least, floor = np.full(shape, inf), np.full(shape, inf)
    workspaces = arrays.workspaces
    for position in reversed(range(line.blocks)):
        for number, width in enumerate(line.widths):
            window = table.windows.get((position, number))
            if window is None:
                continue
            compiled(extend)(
                value,
                least,
                floor,
                table.choice,
                table.channel(position, window, width),
                arrays.prefix,
                arrays.held_bytes,
                arrays.parameter_bytes,
                arrays.inputs,
                workspaces,
                window.kinds,
                window.crowd,
                window.ways,
                window.step_s_per_byte,
                position + width,
                table.depths,
                position,
                number,
                table.micro_batches,
                arrays.recompute_mode,
                table.drains,
            )
        least[:, :-1, position] = value[:, :, position].min(axis=2, initial=inf)
        floor[:, :, position] = np.minimum.accumulate(least[:, :, position], axis=1)


def slices_by_position(
    line: DeviceLine, windows: dict[tuple[int, int], WindowArrays]
) -> list[Integers]:
    """For every position the slices of the windows that start there, padded with zeros."""
    found: list[Integers] = []
    for position in range(line.blocks + 1):
        here = [
            windows[position, number].slices
            for number in range(len(line.widths))
            if (position, number) in windows
        ]
        padded = np.zeros((len(here), max(map(len, here), default=0)), dtype=np.int64)
        for row, slices in zip(padded, here, strict=True):
            row[: len(slices)] = slices
        found.append(padded)
    return found


@dataclass(frozen=True)
class PartitionTable:
    """What `partition` found: least workloads, and the choice that reaches them."""

    arrays: ProfileArrays
    line: DeviceLine
    links: LinkArrays
    windows: dict[tuple[int, int], WindowArrays]
    micro_batch_size: int
    schedule: str
    value: Floats
    choice: Integers
    depths: Integers
    drains: bool

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an iteration."""
        return self.arrays.problem.global_batch // self.micro_batch_size

    @cached_property
    def receivers(self) -> list[Integers]:
        """For every position the slices of the windows that start there."""
        return slices_by_position(self.line, self.windows)

    @cached_property
    def sizes(self) -> Floats:
        """Bytes that cross each cut: activations, then gradients."""
        return np.stack([self.arrays.activations, self.arrays.gradients])

    def channel(self, position: int, window: WindowArrays, width: int) -> Floats:
        """Seconds from a window to each width of the next for each cut, both ways and the busier.

        A table for each of the two.
        """
        line, links = self.line, self.links
        seconds = np.full((2, len(line.widths), self.arrays.layers + 1), inf)
        receivers = self.receivers[position + width]
        if receivers.shape[0]:
            compiled(channel_s)(
                seconds,
                position * line.block,
                window.slices,
                np.array(line.widths, dtype=np.int64) * line.block,
                receivers,
                links.latency_s,
                links.s_per_byte,
                links.uses_port,
                links.host,
                self.sizes,
            )
        return seconds

    def workloads(self) -> Floats:
        """The least workload by number of stages and first block in use."""
        return self.value[:, 0].min(axis=2, initial=inf)

    def candidates(self) -> Iterator[Candidate]:
        """For every number of stages the best plan on all of the line, and on any end of it.

        The estimate is the workload, or more where fill and drain say so:
        ``sum of (P + X) + (M - 1) * max of P and X``.
        """
        workloads = self.workloads()
        for k in range(1, workloads.shape[0]):
            best = int(workloads[k].argmin())
            for position in sorted({0, best}):
                if workloads[k, position] < inf:
                    steps = self.steps(k, position)
                    once = [figure for step in steps for figure in (step.busy_s, step.channel_s)]
                    plan = self.plan(steps)
                    filled_s = sum(once) + (plan.micro_batches - 1) * max(once)
                    yield Candidate(plan, max(filled_s, float(workloads[k, position])))

    def steps(self, stages: int, position: int) -> list["Step"]:
        """The stages behind the best entry for ``stages`` stages from block ``position`` on."""
        number = int(self.value[stages, 0, position].argmin())
        lo = 0
        found: list[Step] = []
        for k in range(stages, 0, -1):
            choice = int(self.choice[k, lo, position, number])
            hi, next_number = divmod(choice, len(self.line.widths) + 1)
            found.append(self.step(k, range(lo, hi), position, number, next_number))
            lo, position, number = hi, position + self.line.widths[number], next_number
        return found

    def step(self, k: int, run: range, position: int, number: int, next_number: int) -> "Step":
        """One stage, ``k`` stages from the end, with what it costs."""
        arrays, mode = self.arrays, self.arrays.recompute_mode
        window, width = self.windows[position, number], self.line.widths[number]
        memory = (arrays.prefix, arrays.held_bytes, arrays.inputs, arrays.workspaces, window.kinds)
        ends, depth = (run.start, run.stop), int(self.depths[k])
        kept = mode != ALWAYS and bool(compiled(fits)(*memory, *ends, depth, False))
        channel_s = 0.0
        if k > 1:
            channel_s = float(self.channel(position, window, width)[0, next_number, run.stop])
        return Step(
            stage=Stage(
                layers=range(arrays.cuts[run.start], arrays.cuts[run.stop]),
                devices=self.line.devices(position, width),
                slices=tuple(map(int, window.slices)),
                recompute=not kept,
            ),
            busy_s=float(compiled(stage_s)(*memory, window.crowd, *ends, depth, mode)),
            channel_s=channel_s,
        )

    def plan(self, steps: Sequence["Step"]) -> Plan:
        """The plan of these stages."""
        return Plan(
            stages=tuple(step.stage for step in steps),
            micro_batches=self.micro_batches,
            micro_batch_size=self.micro_batch_size,
            schedule=self.schedule,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A stage with the seconds of one micro-batch on it, and on the channel behind it."""

    stage: Stage
    busy_s: float
    channel_s: float
