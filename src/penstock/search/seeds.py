"""Many plans by hill climbing on the compiled estimate, from evenly spread starts."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from math import inf
from typing import TypeAlias

import numpy as np

from penstock.kernels import compiled
from penstock.plan.candidate import Candidate
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.row_split import split_rows
from penstock.search.arrays import Integers, SearchArrays, search_arrays
from penstock.search.climb import climb
from penstock.search.estimate import estimate

__all__ = ["Climber", "device_orders_of", "start_of_plan"]

Way: TypeAlias = tuple[int, int, int, int]
"""How depths and recompute are chosen: see `penstock.search.estimate.estimate`."""

THREADS = 4
"""Climbs side by side: compiled code holds no lock."""

SWAPPED_DEVICES = 40
"""On more devices than this no pairs of devices are exchanged: there are too many."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a climb starts or ends: a device order, cuts, and the stages' first positions."""

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    starts: tuple[int, ...]
    micro_batch_size: int
    way: Way

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) - 1


@dataclass
class Climber:
    """Estimates and climbs for one problem."""

    problem: PlanningProblem
    arrays: SearchArrays = field(init=False)

    def __post_init__(self) -> None:
        self.arrays = search_arrays(self.problem)
        cluster = self.problem.cluster
        kinds = {(d.speed, d.memory_bytes) for d in cluster.devices}
        shared_hosts = 1 < len(cluster.hosts) < len(cluster.devices)
        uneven = len(kinds) > 1 or shared_hosts or bool(cluster.links)
        ports = {(host.port_bytes_per_s, host.port_latency_s) for host in cluster.hosts}
        self.swaps = (uneven or len(ports) > 1) and len(cluster.devices) <= SWAPPED_DEVICES

    @property
    def most_stages(self) -> int:
        """Stages that a plan may have."""
        layers = len(self.problem.profile.layers)
        return min(layers, len(self.problem.cluster.devices), self.problem.max_stages or layers)

    def ways(self) -> tuple[Way, ...]:
        """The choices of depth and recompute that the problem allows."""
        again = {"off": 0, "auto": 1, "on": 2}[self.problem.recompute]
        shallow = (0, 1) if again == 1 else (0,)
        ways: list[Way] = []
        for schedule in self.problem.schedules:
            match schedule:
                case "1f1b":
                    ways += [(0, again, s, 0) for s in shallow]
                case "early-backward":
                    ways += [(1, again, s, 0) for s in shallow]
                case "gpipe" if "early-backward" not in self.problem.schedules:
                    ways.append((2, again, 0, 1))
                case _:
                    pass
        return tuple(ways)

    def even_start(
        self, order: tuple[int, ...], stages: int, micro_batch_size: int, way: Way
    ) -> Start:
        """Stages with equally many devices, and layers of equal work for each device."""
        width = min(micro_batch_size, len(order) // stages)
        used = min(len(order), stages * micro_batch_size)
        widths = [width + (i < used - stages * width) for i in range(stages)]
        starts = tuple(accumulate(widths, initial=0))
        return Start(
            order,
            self.even_cuts(starts, micro_batch_size),
            starts,
            micro_batch_size,
            way,
        )

    def even_cuts(self, starts: tuple[int, ...], micro_batch_size: int) -> tuple[int, ...]:
        """Layer cuts in proportion to the devices of each stage."""
        a, stages = self.arrays, len(starts) - 1
        sums = a.forward + a.backward
        work = [float(seconds) for seconds in sums[0] + micro_batch_size * sums[1]]
        layers = len(work) - 1
        cuts = [0]
        for s in range(1, stages):
            goal = work[-1] * starts[s] / starts[-1]
            right = bisect_left(work, goal)
            nearest = right if right and work[right] - goal < goal - work[right - 1] else right - 1
            cuts.append(max(cuts[-1] + 1, min(nearest, layers - (stages - s))))
        return (*cuts, layers)

    def room(self, start: Start) -> tuple[Integers, Integers, Integers]:
        """The start as arrays, with room for as many stages as there may be."""
        cuts = np.full(self.most_stages + 1, start.cuts[-1], dtype=np.int64)
        starts = np.full(self.most_stages + 1, start.starts[-1], dtype=np.int64)
        cuts[: start.stages + 1] = start.cuts
        starts[: start.stages + 1] = start.starts
        return np.array(start.order, dtype=np.int64), cuts, starts

    def estimate(self, start: Start) -> tuple[float, Plan | None]:
        """Estimated seconds of a start, and its plan where it fits."""
        order, cuts, starts = self.room(start)
        depth = np.zeros(self.most_stages + 1, dtype=np.int64)
        recompute = np.zeros(self.most_stages + 1, dtype=np.int64)
        size = start.micro_batch_size
        micro_batches = self.problem.global_batch // size
        seconds = compiled(estimate)(
            self.arrays, order, cuts, starts, start.stages, size, micro_batches, start.way,
            depth, recompute,
        )  # fmt: skip
        if not seconds < inf:
            return inf, None
        return seconds, self.plan(start, depth, recompute)

    def climb(self, start: Start, budget: int) -> Start:
        """The best start that at most ``budget`` estimates reach by moves."""
        order, cuts, starts = self.room(start)
        size = start.micro_batch_size
        shape = (size, self.problem.global_batch // size)
        _, stages, _ = compiled(climb)(
            self.arrays, order, cuts, starts, start.stages, shape, start.way, budget, self.swaps
        )
        return Start(
            tuple(order.tolist()),
            tuple(cuts[: stages + 1].tolist()),
            tuple(starts[: stages + 1].tolist()),
            size,
            start.way,
        )

    def climb_all(self, starts: Iterable[Start], budget: int) -> list[Start]:
        """`climb` from every start, on several cores."""
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(self.climb, starts, repeat(budget)))

    def plan(self, start: Start, depth: Integers, recompute: Integers) -> Plan:
        """The plan of a start, under the plainest schedule that has its depths."""
        stages: list[Stage] = []
        for s in range(start.stages):
            devices = start.order[start.starts[s] : start.starts[s + 1]]
            speeds = [self.problem.cluster.devices[device].speed for device in devices]
            rows = split_rows(start.micro_batch_size, speeds)
            run = range(start.cuts[s], start.cuts[s + 1])
            stages.append(Stage(run, devices, rows, bool(recompute[s])))
        micro_batches = self.problem.global_batch // start.micro_batch_size
        schedule, limit = self.schedule_of(depth[: start.stages].tolist(), micro_batches)
        return Plan(
            tuple(stages), micro_batches, start.micro_batch_size, schedule, in_flight_limit=limit
        )

    def schedule_of(self, depth: list[int], micro_batches: int) -> tuple[str, tuple[int, ...]]:
        """Schedule and limits that keep so many micro-batches in flight."""
        allowed, stages = self.problem.schedules, len(depth)
        warm_up = [min(stages - s, micro_batches) for s in range(stages)]
        if "1f1b" in allowed and depth == warm_up:
            return "1f1b", ()
        if "gpipe" in allowed and min(depth) == micro_batches:
            return "gpipe", ()
        if "early-backward" in allowed:
            deep = [min(2 * (stages - s) - 1, micro_batches) for s in range(stages)]
            return "early-backward", () if depth == deep else tuple(depth)
        return "1f1b", tuple(depth)

    def screened(
        self, orders: Sequence[tuple[int, ...]], stage_counts: Iterable[int]
    ) -> list[tuple[float, Start]]:
        """Even starts of all orders, sizes and ways, best first; those that fit."""
        found: list[tuple[float, Start]] = []
        for stages in stage_counts:
            for size in self.problem.micro_batch_sizes:
                for order in orders:
                    for way in self.ways():
                        start = self.even_start(order, stages, size, way)
                        found.append((self.estimate(start)[0], start))
        return sorted(found, key=lambda pair: pair[0])

    def candidate(self, start: Start) -> Candidate | None:
        """A start as a plan with its estimate; none where it does not fit."""
        seconds, plan = self.estimate(start)
        return Candidate(plan, seconds) if plan else None


def start_of_plan(plan: Plan, devices: int, way: Way) -> Start:
    """A plan as a start of a climb; devices that it does not use come last."""
    used = plan.devices
    unused = tuple(device for device in range(devices) if device not in set(used))
    starts = accumulate((stage.replicas for stage in plan.stages), initial=0)
    return Start(
        (*used, *unused),
        (0, *(stage.layers.stop for stage in plan.stages)),
        tuple(starts),
        plan.micro_batch_size,
        way,
    )


def device_orders_of(problem: PlanningProblem) -> tuple[tuple[int, ...], ...]:
    """Orders to place stages along: as numbered, round robin over hosts, fast first, slow first."""
    cluster = problem.cluster
    devices = range(len(cluster.devices))
    place: dict[int, int] = {}
    taken: dict[int, int] = {}
    for device in devices:
        host = cluster.host_index[device]
        place[device] = taken.get(host, 0)
        taken[host] = place[device] + 1

    def speed(device: int) -> float:
        return cluster.devices[device].speed

    fast_first = sorted(devices, key=lambda device: (-speed(device), device))
    slow_first = sorted(devices, key=lambda device: (speed(device), device))
    scattered = sorted(devices, key=lambda device: (place[device], device))
    return tuple(dict.fromkeys(map(tuple, (devices, scattered, fast_first, slow_first))))
