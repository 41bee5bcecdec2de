"""PipeDream's planner: the slowest stage is made as fast as possible, level by level."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.cluster.link_matrices import link_matrices
from penstock.core import native
from penstock.core.native import RunCosts
from penstock.costs.fit import Assignment, fitted_plan
from penstock.costs.run_tables import Floats, Integers, at, run_tables, runs_at
from penstock.costs.stage_costs import rows_by_speed
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.choice import Candidate, best_candidate
from penstock.planners.coarse_chain import likely_cuts


@dataclass(frozen=True, slots=True)
class Level:
    """Units of a level: how many stand in one unit of the next level, and of how many devices.

    ``bytes_per_s`` is the slowest rate between two of them.
    """

    workers: int
    devices: int
    bytes_per_s: float


def levels_of(cluster: Cluster) -> tuple[tuple[int, ...], tuple[Level, ...]]:
    """The devices, those of a unit side by side, and the levels, lowest first.

    A level parts the devices in units of equal size, so that every link inside a unit is faster
    than every link between two: devices in hosts, hosts in racks. Where links part them in no such
    way there is one level, of all devices.

    >>> from penstock.cluster.toml_file import find_cluster
    >>> [level.workers for level in levels_of(find_cluster("dapple-a"))[1]]
    [8, 2]
    >>> [level.workers for level in levels_of(find_cluster("dapple-b"))[1]]
    [16]
    """
    links = link_matrices(cluster).bytes_per_s
    slower = np.minimum(links, links.T)
    order, joins = strongest_first(slower)
    slower = slower[np.ix_(order, order)]
    np.fill_diagonal(slower, inf)
    count = len(order)
    sizes = [1]
    for rate in sorted(set(joins), reverse=True):
        ends = [0, *(i + 1 for i, join in enumerate(joins) if join < rate), count]
        size = ends[1]
        if size < count and {b - a for a, b in pairwise(ends)} == {size}:
            inside = same_unit(count, size)
            if slower[inside].min() > slower[~inside].max():
                sizes.append(size)
    levels: list[Level] = []
    for size, upper in pairwise([*sizes, count] if count > 1 else [1, 1]):
        between = same_unit(count, upper) & ~same_unit(count, size)
        levels.append(Level(upper // size, size, float(slower[between].min(initial=inf))))
    return order, tuple(levels)


def same_unit(count: int, size: int) -> np.ndarray:
    """A mask of the pairs of ``count`` devices that are in the same unit of ``size`` devices."""
    unit = np.arange(count) // size
    return unit[:, None] == unit[None, :]


def strongest_first(rates: Floats) -> tuple[tuple[int, ...], list[float]]:
    """All devices, each next the one with the fastest link to those before it; and those rates.

    So devices that a rate joins, directly or through others, stand side by side (Prim).
    """
    order, joins = [0], list[float]()
    reached = rates[0].copy()
    left = np.ones(len(rates), dtype=bool)
    left[0] = False
    while left.any():
        nearest = int(np.where(left, reached, -1.0).argmax())
        order.append(nearest)
        joins.append(float(reached[nearest]))
        left[nearest] = False
        reached = np.maximum(reached, rates[nearest])
    return tuple(order), joins


MOST_LAYERS = 120
"""Longer chains are cut at likely places only: the time grows with the cube of the layers."""

EVERY_COUNT = 16
"""Workers of a level up to which every number of replicas is tried."""

ONE_LESS = -1
"""The choice of the recurrence that is no stage."""

Places: TypeAlias = tuple[int, ...]
"""Devices, by their places in the order of `levels_of`."""


def pipedream(problem: PlanningProblem, score: Score) -> Plan:
    """The plan of PipeDream's dynamic program (SOSP 2019), trained synchronously.

    The program is solved on every level of the cluster (devices of a host, hosts of a rack, racks;
    see `levels_of`). A worker of an upper level is a whole unit of the level below. ``A`` are the
    seconds of the slowest stage of layers ``i..j`` on ``m`` workers:

        T(i, j, m) = (compute(i..j) + 4 (m - 1) P(i..j) / (BW m)) / m
        A(i, j, m) = min of T(i, j, m) and, over k and m', of
                     max{ A(i, k, m - m'),  T(k, j, m'),  2 a_k / (BW m'),  2 a_j / (BW m') }

    ``compute`` is forward and backward of a micro-batch on one worker. On an upper level it is the
    ``A`` of a whole unit, whose devices share the all-reduce between units. The factor 4 is that of
    weights sent to and from a parameter server for every micro-batch. ``a`` are the bytes of
    activations at a cut, so ``2 a`` counts their gradients too. A worker may stay idle.

    A stage must fit on each of its devices with ``ceil(devices from here to the end / devices of
    the stage)`` micro-batches in flight. The devices are counted through all levels, so a unit's
    own pipeline depends on what is behind it. Micro-batches of every size are tried. Each plan is
    run by 1F1B with a flush at the end of the batch (or by the first schedule allowed where 1F1B is
    not). ``score`` chooses among the sizes.

    Departures from the paper:

    - A micro-batch is split over replicas, instead of dealt to them in turn.
    - Weights are not stashed, so they count once.
    - Transfers always count. The released code leaves them out unless a compression ratio is given.
    - All-reduces of an upper level divide by its workers for every stage, as printed above. The
      released code seems to do so only where one stage takes the whole level.
    - Workers count as slow as the slowest device, and links of a level as the slowest link.
    - On more than `EVERY_COUNT` workers of a level not all numbers of replicas are tried
      (`replicas_tried`). Chains of more than `MOST_LAYERS` layers are cut at likely places only.
    """
    return best_candidate(problem, pipedream_candidates(problem), score, planner="pipedream")


def pipedream_candidates(problem: PlanningProblem) -> Iterator[Candidate]:
    """The plan of every micro-batch size."""
    schedule = "1f1b" if "1f1b" in problem.schedules else problem.schedules[0]
    order, levels = levels_of(problem.cluster)
    cuts = likely_cuts(problem, MOST_LAYERS)
    tables, runs = run_tables(problem, cuts), range(len(cuts) - 1)
    whole = Window(tuple(problem.cluster.devices[d].memory_bytes for d in order), 1, 0)
    everyone = tuple((place,) for place in range(len(order)))
    for size in problem.micro_batch_sizes:
        program = DynamicProgram(problem, tables, levels, size)
        top = len(levels) - 1
        seconds = float(program.solved(top, whole).value[0, -1, -1])
        if seconds == inf:
            continue
        assignments: list[Assignment] = []
        for run, places in program.stages(top, whole, runs, everyone):
            devices = tuple(order[place] for place in sorted(places))
            rows = rows_by_speed(problem.cluster, devices, size)
            assignments.append((range(cuts[run.start], cuts[run.stop]), devices, rows))
        plan = fitted_plan(problem, assignments, schedule)
        if plan is not None:
            yield Candidate(plan, seconds)


def replicas_tried(workers: int) -> list[int]:
    """Every number of up to `EVERY_COUNT` workers; of more, ever wider steps.

    >>> replicas_tried(3), replicas_tried(30)
    ([1, 2, 3], [1, 2, 3, 4, 6, 8, 12, 16, 24, 30])
    """
    if workers <= EVERY_COUNT:
        return list(range(1, workers + 1))
    steps = {n << power for power in range(workers.bit_length()) for n in (1, 3)}
    return sorted({workers, *(n for n in steps if n < workers)})


@dataclass(frozen=True, slots=True)
class Window:
    """The place of a unit in the pipeline.

    ``memory_bytes`` are those of its devices, each the least over all ``replicas`` of the unit.
    ``behind`` counts the devices behind the unit and its replicas, to the end of the pipeline.
    """

    memory_bytes: tuple[float, ...]
    replicas: int
    behind: int

    def workers(self, before: int, count: int, each: int) -> "Window":
        """The window of ``count`` workers of ``each`` devices as replicas of one unit."""
        end = (before + count) * each
        places = [self.memory_bytes[a : a + each] for a in range(before * each, end, each)]
        least = tuple(map(min, *places)) if count > 1 else places[0]
        behind = self.behind + self.replicas * (len(self.memory_bytes) - end)
        return Window(least, self.replicas * count, behind)


@dataclass(frozen=True, slots=True)
class Solved:
    """The table of one level: least seconds by ``[lo, hi, workers]``, and the choices behind them.

    ``unit_s`` are the least seconds on all workers.
    """

    value: Floats
    choice: Integers
    unit_s: Floats

    def stages(self, lo: int, hi: int) -> list[tuple[range, int, int]]:
        """Layers of each stage, workers before it, and its own, in order."""
        found: list[tuple[range, int, int]] = []
        workers = self.value.shape[2] - 1
        while hi > lo:
            chosen = int(self.choice[lo, hi, workers])
            if chosen == ONE_LESS:
                workers -= 1
                continue
            cut, last = divmod(chosen, self.value.shape[2])
            workers -= last
            found.append((range(cut, hi), workers, last))
            hi = cut
        return found[::-1]


@dataclass
class DynamicProgram:
    """The tables of all levels for micro-batches of ``size`` samples; equal ones are made once."""

    problem: PlanningProblem
    tables: RunCosts
    levels: tuple[Level, ...]
    size: int
    solutions: dict[object, Solved] = field(default_factory=dict[object, Solved])
    fitting: dict[object, Floats] = field(default_factory=dict[object, Floats])

    def __post_init__(self) -> None:
        tables, size = self.tables, self.size
        slowest = min(device.speed for device in self.problem.cluster.devices)
        self.compute_s = (runs_at(tables.forward, size) + runs_at(tables.backward, size)) / slowest
        self.moved_bytes = at(tables.down, size) + at(tables.up, size)
        self.saved = runs_at(tables.saved, size)
        self.kept_bytes = np.minimum(self.saved, at(tables.inputs, size))
        if self.problem.recompute == "off":
            self.kept_bytes = self.saved
        memories = [device.memory_bytes for device in self.problem.cluster.devices]
        most = self.problem.global_batch // size
        fullest = self.tables.held + self.saved + (most - 1) * self.kept_bytes
        self.all_fit = bool((fullest <= min(memories)).all())

    def solved(self, level: int, window: Window) -> Solved:
        """The table of the workers of a unit at ``window``."""
        if self.all_fit:
            window = replace(window, behind=0)
        if (level, window) not in self.solutions:
            self.solutions[level, window] = self.solve(level, window)
        return self.solutions[level, window]

    def unit_s(self, level: int, window: Window) -> Floats:
        """Seconds of a micro-batch on one worker of a level, for every run of layers."""
        if level:
            return self.solved(level - 1, window).unit_s
        in_flight = -(-(window.replicas + window.behind) // window.replicas)
        in_flight = min(in_flight, self.problem.global_batch // self.size)
        key = (*window.memory_bytes, window.replicas, in_flight)
        if key not in self.fitting:
            kept = (self.saved + (in_flight - 1) * self.kept_bytes) / window.replicas
            fits = self.tables.held_by(window.replicas) + kept <= window.memory_bytes[0]
            self.fitting[key] = np.where(fits, self.compute_s, inf)
        return self.fitting[key]

    def solve(self, level: int, window: Window) -> Solved:
        """Fill the table of a level; that of the highest for whole pipelines only."""
        here = self.levels[level]
        counts = [n for n in replicas_tried(here.workers) if n * window.replicas <= self.size]
        unit = np.zeros((here.workers, here.workers + 1), dtype=np.int64)
        different: dict[int, tuple[int, Floats]] = {}
        for count in counts:
            for before in range(here.workers - count + 1):
                one = self.unit_s(level, window.workers(before, count, here.devices))
                unit[before, count], _ = different.setdefault(id(one), (len(different), one))
        known = (level, window.replicas, unit.tobytes(), *different)
        if known in self.solutions:
            return self.solutions[known]
        reduce_each = np.full(here.workers + 1, inf)
        for count in counts:
            reduce_each[count] = 4 * (count - 1) / (here.bytes_per_s * count) / here.devices
        cuts = len(self.compute_s)
        starts = 1 if level + 1 == len(self.levels) else cuts
        value = np.full((starts, cuts, len(reduce_each)), inf)
        choice = np.full(value.shape, ONE_LESS, dtype=np.int64)
        native.divide_level(
            value,
            choice,
            np.stack([one for _, one in different.values()]),
            unit,
            self.compute_s / here.devices,
            self.tables.parameters,
            reduce_each,
            self.moved_bytes / here.bytes_per_s,
        )
        self.solutions[known] = Solved(value, choice, np.ascontiguousarray(value[:, :, -1]))
        return self.solutions[known]

    def stages(
        self, level: int, window: Window, layers: range, places: Sequence[Places]
    ) -> Iterator[tuple[range, Places]]:
        """Layers and devices of all stages of a unit.

        ``places`` are the devices that stand in each place of the unit, one for each replica.
        """
        each = self.levels[level].devices
        for run, before, count in self.solved(level, window).stages(layers.start, layers.stop):
            inner = [
                sum((places[worker * each + place] for worker in range(before, before + count)), ())
                for place in range(each)
            ]
            if level:
                stood = window.workers(before, count, each)
                yield from self.stages(level - 1, stood, run, inner)
            else:
                yield run, inner[0]
