"""The table of the exact dynamic program over layer boundaries, devices and replicas."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from penstock.kernels import compiled
from penstock.plan.candidate import Candidate
from penstock.plan.cost import depth_function
from penstock.plan.plan import Plan, Stage
from penstock.plan.run_tables import Floats
from penstock.plan.window_costs import CostSource, TransferCosts, Window
from penstock.planners.recurrence import Integers, extend

__all__ = ["MOST_CUTS", "Table", "fill"]

MOST_CUTS = 100
"""Longer chains are cut at likely places only: the table grows with the square of the cuts."""

MOST_DEVICES, MOST_BLOCKS = 16, 12
"""On more devices a stage takes whole blocks of them: the table grows with the fourth power."""


def fill(
    source: CostSource,
    order: tuple[int, ...],
    schedule: str,
) -> "Table":
    """The table of the least iteration times, from the last stage to the first.

    ``V(k, lo, p, r)``: layers ``lo..`` to the end as ``k`` stages, the first of them on the
    ``r`` devices from position ``p`` of ``order``, every other on the devices right after it:

        V(1, lo, p, r) = M * P + A
        V(k, lo, p, r) = min over end hi and next replicas r' of
                         max{ M * P + A,   M * X,   P + Y + V(k - 1, hi, p + r, r') }

    ``P``: forward, backward and (where needed to fit) recompute of layers ``lo..hi-1`` on the
    slowest replica, infinite where it exceeds a device's memory with the micro-batches that the
    schedule keeps in flight ``k`` stages from the end; ``A``: all-reduce and optimizer step; ``X``
    and ``Y``: the transfer's busier direction, and both; ``M``: micro-batches. So a stage is busy
    for ``M * P`` between the fill and the drain of the stages before it.

    Source: PipeDream (SOSP 2019, section 3.1) for the table over layers and replicas, SPP (INFOCOM
    2022, PRM) for consecutive devices of an order, the last stage's replicas in the state, and
    the workload ``M * P + A``; the fill and drain ``P + Y`` are DAPPLE's (PPoPP 2021) warm-up and
    ending phases.

    Exact for this objective: ``V`` grows with ``V(k - 1, ...)``, so the best rest is best for
    every first stage. It is not the iteration time: an all-reduce is counted as if it held up the
    drain of the stages before, and skip tensors as if they passed through every stage.

    With more devices than `MOST_DEVICES` a stage takes whole blocks of them.
    """
    problem, cuts = source.problem, source.cuts
    marks = block_marks(len(order))
    layers, blocks = len(cuts) - 1, len(marks) - 1
    most_stages = min(blocks, layers, problem.max_stages or layers)
    micro_batches = problem.global_batch // source.micro_batch_size
    depth = depth_function(schedule)
    depths = np.array([0, *(depth(k, micro_batches) for k in range(1, most_stages + 1))])
    shape = (most_stages + 1, layers, blocks, blocks + 1)
    value, choice = np.full(shape, inf), np.full(shape, -1, dtype=np.int64)
    # One more position: behind the last device nothing fits.
    least = np.full((most_stages + 1, layers + 1, blocks + 1), inf)
    for position in reversed(range(blocks)):
        for width in range(1, blocks - position + 1):
            devices = order[marks[position] : marks[position + width]]
            if len(devices) > source.micro_batch_size:
                break
            window = source.window(devices)
            costs = source.costs(window)
            after = [order[marks[position + width] : mark] for mark in marks[position + width :]]
            moved = transfers_to_next(source, window, after[1:])
            compiled(extend)(
                value,
                least,
                choice,
                costs.forward_s,
                costs.busy_s,
                costs.tail_s,
                costs.kept_depth,
                costs.recompute_depth,
                moved.busier_s,
                moved.round_trip_s,
                depths,
                position,
                width,
                micro_batches,
            )
    return Table(source, order, schedule, value, choice, depths, marks)


def block_marks(devices: int) -> tuple[int, ...]:
    """Where blocks of devices begin and end; every device is one where there are few.

    >>> block_marks(3), block_marks(40)
    ((0, 1, 2, 3), (0, 3, 7, 10, 13, 17, 20, 23, 27, 30, 33, 37, 40))
    """
    count = devices if devices <= MOST_DEVICES else MOST_BLOCKS
    return tuple(round(i * devices / count) for i in range(count + 1))


def transfers_to_next(
    source: CostSource, window: Window, next_devices: Sequence[tuple[int, ...]]
) -> TransferCosts:
    """Transfers from ``window`` to every width of the next window: row ``r'``, column cut."""
    shape = (len(next_devices) + 1, len(source.cuts))
    busier_s, round_trip_s = np.full(shape, inf), np.full(shape, inf)
    for width, devices in enumerate(next_devices, start=1):
        if len(devices) <= source.micro_batch_size:
            moved = source.transfers(window, source.window(devices))
            busier_s[width], round_trip_s[width] = moved.busier_s, moved.round_trip_s
    return TransferCosts(busier_s, round_trip_s)


@dataclass(frozen=True)
class Table:
    """What `fill` found: least seconds, and the choice that reaches them."""

    source: CostSource
    order: tuple[int, ...]
    schedule: str
    value: Floats
    choice: Integers
    depths: Integers
    marks: tuple[int, ...]

    def candidates(self, most: int = 0) -> Iterator[Candidate]:
        """The best plan for every number of stages on every end of the device order.

        Only the ``most`` best of them, where that is not 0.
        """
        best_s = self.value[:, 0].min(axis=2)
        found = sorted((float(best_s[k, p]), int(k), int(p)) for k, p in np.argwhere(best_s < inf))
        for seconds, k, position in found[: most or len(found)]:
            width = int(self.value[k, 0, position].argmin())
            yield Candidate(self.plan(k, position, width), seconds)

    def plan(self, stages: int, position: int, width: int) -> Plan:
        """The plan behind one entry of the table that starts at layer 0."""
        problem, widths = self.source.problem, self.value.shape[3]
        found: list[Stage] = []
        lo = 0
        for k in range(stages, 0, -1):
            hi, next_width = divmod(int(self.choice[k, lo, position, width]), widths)
            devices = self.order[self.marks[position] : self.marks[position + width]]
            window = self.source.window(devices)
            run = range(self.source.cuts[lo], self.source.cuts[hi])
            kept = self.source.costs(window).kept_depth[lo, hi]
            found.append(Stage(run, window.devices, window.slices, bool(self.depths[k] > kept)))
            lo, position, width = hi, position + width, next_width
        return Plan(
            stages=tuple(found),
            micro_batches=problem.global_batch // self.source.micro_batch_size,
            micro_batch_size=self.source.micro_batch_size,
            schedule=self.schedule,
        )
