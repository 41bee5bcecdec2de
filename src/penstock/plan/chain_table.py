"""The table of the exact dynamic program over layer boundaries, devices and replicas."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from penstock.plan.candidate import Candidate
from penstock.plan.cost import depth_function
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.recurrence import Integers, compiled_extend
from penstock.plan.run_tables import Floats
from penstock.plan.window_costs import CostSource, TransferCosts, Window

__all__ = ["Table", "device_orders", "fill"]


def device_orders(problem: PlanningProblem) -> tuple[tuple[int, ...], ...]:
    """The cluster's own order; and, where speeds differ, that order without the slowest devices."""
    devices = problem.cluster.devices
    speeds = sorted({device.speed for device in devices})
    return tuple(
        tuple(i for i, device in enumerate(devices) if device.speed >= least) for least in speeds
    )


def fill(source: CostSource, order: tuple[int, ...], schedule: str) -> "Table":
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
    """
    problem = source.problem
    layers = len(problem.profile.layers)
    most_stages = min(len(order), layers, problem.max_stages or layers)
    micro_batches = problem.global_batch // source.micro_batch_size
    depth = depth_function(schedule)
    depths = np.array([0, *(depth(k, micro_batches) for k in range(1, most_stages + 1))])
    shape = (most_stages + 1, layers, len(order), len(order) + 1)
    value, choice = np.full(shape, inf), np.full(shape, -1, dtype=np.int64)
    # One more position: behind the last device nothing fits.
    least = np.full((most_stages + 1, layers + 1, len(order) + 1), inf)
    extend = compiled_extend()
    for position in reversed(range(len(order))):
        widest = min(len(order) - position, source.micro_batch_size)
        for replicas in range(1, widest + 1):
            window = source.window(order[position : position + replicas])
            costs = source.costs(window)
            moved = transfers_to_next(source, window, order[position + replicas :])
            extend(
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
                replicas,
                micro_batches,
            )
    return Table(source, order, schedule, value, choice, depths)


def transfers_to_next(
    source: CostSource, window: Window, devices_after: tuple[int, ...]
) -> TransferCosts:
    """Transfers from ``window`` to every width of the next window: row ``r'``, column cut."""
    shape = (len(devices_after) + 1, len(source.problem.profile.layers) + 1)
    busier_s, round_trip_s = np.full(shape, inf), np.full(shape, inf)
    for replicas in range(1, min(len(devices_after), source.micro_batch_size) + 1):
        moved = source.transfers(window, source.window(devices_after[:replicas]))
        busier_s[replicas], round_trip_s[replicas] = moved.busier_s, moved.round_trip_s
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

    def candidates(self) -> Iterator[Candidate]:
        """The best plan for every number of stages on every end of the device order."""
        best_s = self.value[:, 0].min(axis=2)
        for k, position in np.argwhere(best_s < inf):
            replicas = int(self.value[k, 0, position].argmin())
            plan = self.plan(int(k), int(position), replicas)
            yield Candidate(plan, float(best_s[k, position]))

    def plan(self, stages: int, position: int, replicas: int) -> Plan:
        """The plan behind one entry of the table that starts at layer 0."""
        problem, widths = self.source.problem, self.value.shape[3]
        found: list[Stage] = []
        lo = 0
        for k in range(stages, 0, -1):
            hi, next_replicas = divmod(int(self.choice[k, lo, position, replicas]), widths)
            window = self.source.window(self.order[position : position + replicas])
            too_deep = self.depths[k] > self.source.costs(window).kept_depth[lo, hi]
            found.append(Stage(range(lo, hi), window.devices, window.slices, bool(too_deep)))
            lo, position, replicas = hi, position + replicas, next_replicas
        return Plan(
            stages=tuple(found),
            micro_batches=problem.global_batch // self.source.micro_batch_size,
            micro_batch_size=self.source.micro_batch_size,
            schedule=self.schedule,
        )
