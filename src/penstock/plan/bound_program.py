"""The least time of any relaxed plan: cuts, replicas, micro-batch size, and the best of links."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, log, sqrt

import numpy as np

from penstock.plan.bound_headroom import FIGURES, TERMS, compiled_headroom
from penstock.plan.bound_links import LinkLimits, link_limits
from penstock.plan.bound_options import Option, Supply, device_supply, options_of
from penstock.plan.bound_reach import (
    FINE_FRONT,
    FRONT,
    FRONT_OF_MANY,
    SPREADS,
    WIDTHS,
    compiled_reach,
)
from penstock.plan.bound_steps import POINT
from penstock.plan.bound_tables import ProfileTables, floor_of, profile_tables, time_sums
from penstock.plan.bound_trips import KINDS
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import Floats

__all__ = [
    "PRECISION",
    "Relaxation",
    "RelaxedPlan",
    "RelaxedStage",
    "SizedRelaxation",
    "least_relaxed",
    "relaxation",
]

PRECISION = 3e-4
"""The bound is this close (as a part of itself) to the least time of any relaxed plan."""

ROUGHLY = 0.03
"""The same while micro-batch sizes are only compared."""

MANY_DEVICES, MANY_PRECISION = 64, 1e-2
"""The same on more devices than this, where each question takes long."""

FIRST_STEP, LONGEST_STEP = 1.02, 1.25
"""The first guess above a known bound; each further one goes twice as far, up to a limit: what no
plan reaches is soon answered, what many plans reach is not."""

THREADS = 2
"""Micro-batch sizes that are asked side by side."""

MOST_BYTES = 250e6
"""Sizes with larger tables are asked one after the other."""

LEAST_S = 1e-9
"""Where nothing is known to take time, the search for the bound starts here."""

WORTH_FINER = 0.01
"""Where finer fronts show that no plan comes so close to the bound found, they are used."""

MOST_FRONT_BYTES = 500e6
"""Fine fronts may take so much room."""

MOST_S = 1e15
"""What takes longer than this never ends: no stage fits in any memory."""

Kernel = Callable[..., int]


@dataclass(frozen=True, slots=True)
class RelaxedStage:
    """A run of layers on an option of devices, which may be better than any real ones."""

    layers: range
    option: Option


@dataclass(frozen=True)
class RelaxedPlan:
    """A plan on the best conceivable devices and links; ``seconds`` no more than it takes."""

    micro_batch_size: int
    stages: tuple[RelaxedStage, ...]
    seconds: float


@dataclass(frozen=True)
class Relaxation:
    """All about a problem that the program needs for any micro-batch size."""

    problem: PlanningProblem
    tables: ProfileTables
    limits: LinkLimits
    supply: Supply
    fill: Callable[..., None]
    reach: Kernel
    front: int = FRONT

    @property
    def finer(self) -> "Relaxation":
        """The same with finer fronts, where there is room for them; else itself."""
        states = (len(self.problem.profile.layers) + 1) * self.supply.states * len(self.room)
        fits = states * WIDTHS * FINE_FRONT * POINT * 8 <= MOST_FRONT_BYTES
        return replace(self, front=FINE_FRONT) if fits and self.front == FRONT else self

    def of_size(self, rows: int) -> "SizedRelaxation":
        """The relaxation for micro-batches of ``rows`` samples."""
        return SizedRelaxation(self, rows, options_of(self.supply, self.limits, rows))

    @cached_property
    def left(self) -> np.ndarray:
        """For every state of the supply the digits left."""
        totals = self.supply.totals
        grid = np.indices([n + 1 for n in totals]).reshape(len(totals), -1).T
        return np.ascontiguousarray(np.array(totals) - grid).astype(np.int64)

    @cached_property
    def used(self) -> np.ndarray:
        """For every state the fewest devices that are taken."""
        taken = np.array(self.supply.totals) - self.left
        if self.supply.by_speed:
            fastest = max(c.speed for c in self.supply.classes)
            return np.ceil(taken[:, 0] * self.supply.unit_speed / fastest - 1e-9).astype(np.int64)
        return taken.sum(axis=1).astype(np.int64)

    @cached_property
    def room(self) -> np.ndarray:
        """The most devices of one host, of two, and so on; the last counts for all others."""
        devices = len(self.problem.cluster.devices)
        if not self.limits.host_devices:
            return np.array([devices])
        room = np.cumsum(self.limits.hosts_by_size)[:SPREADS]
        room[-1] = devices
        return room

    @cached_property
    def most_used(self) -> np.ndarray:
        """For every state the most devices that may be taken, though charged as fewer."""
        taken = (np.array(self.supply.totals) - self.left).sum(axis=1)
        return taken if self.supply.by_speed else taken + taken // 4

    @cached_property
    def capacity(self) -> Floats:
        """For every state the most speed of the devices left."""
        taken = np.array(self.supply.totals) - self.left
        total = sum(c.speed * c.count for c in self.supply.classes)
        if self.supply.by_speed:
            return np.maximum(total - taken[:, 0] * self.supply.unit_speed, 1e-12)
        return np.maximum(total - taken @ np.array([c.speed for c in self.supply.classes]), 1e-12)


def relaxation(
    problem: PlanningProblem,
    fill: Callable[..., None] | None = None,
    reach: Kernel | None = None,
) -> Relaxation:
    """Prepare ``problem``; the kernels are compiled ones unless given."""
    limits = link_limits(problem.cluster)
    many = len(problem.cluster.devices) > MANY_DEVICES
    return Relaxation(
        problem,
        profile_tables(problem),
        limits,
        device_supply(problem.cluster, limits),
        fill or compiled_headroom(),
        reach or compiled_reach(),
        FRONT_OF_MANY if many else FRONT,
    )


@dataclass(frozen=True)
class SizedRelaxation:
    """The relaxation of one micro-batch size."""

    relaxed: Relaxation
    rows: int
    options: tuple[Option, ...]
    filled_s: list[float] = field(default_factory=lambda: [-inf])

    @property
    def batches(self) -> int:
        """Micro-batches of an iteration."""
        return self.relaxed.problem.global_batch // self.rows

    @cached_property
    def times(self) -> Floats:
        """Sums of forward and backward over the first layers."""
        return time_sums(self.relaxed.problem.profile, self.rows)

    @cached_property
    def figures(self) -> Floats:
        """`FIGURES` of every option."""
        figures = np.zeros((len(self.options), len(FIGURES)))
        for row, option in zip(figures, self.options, strict=True):
            receive, send = option.placement.receive, option.placement.send
            flat, *other = option.placement.ways or (None,)
            row[:13] = (
                option.row_s,
                option.slowest_row_s,
                1 / option.fastest,
                option.rows_least,
                option.memory_bytes,
                receive.all,
                send.all,
                option.replicas,
                option.most_replicas,
                receive.best,
                send.best,
                receive.second,
                send.second,
            )
            if flat:
                second = other[0] if other else flat
                row[13:17] = flat.latency_s, flat.s_per_byte, second.latency_s, second.s_per_byte
        taken = np.array([option.taken for option in self.options], dtype=np.int64)
        strides = np.array(self.relaxed.supply.strides, dtype=np.int64)
        figures[:, 17] = self.relaxed.capacity[taken @ strides]
        return figures

    @cached_property
    def near(self) -> Floats:
        """The messages at each cut, forward and backward: the surest, and those of two layers."""
        near = self.relaxed.tables.near
        return np.ascontiguousarray(np.stack([near.forward, near.backward], axis=1))

    @cached_property
    def sums(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Parameters, workspace, memory and traffic for `headroom`."""
        profile = self.relaxed.problem.profile
        runs, tables = self.relaxed.tables.runs, self.relaxed.tables
        saved = [floor_of(layer.saved_bytes, self.rows) for layer in profile.layers]
        saved_sums = np.cumsum([[0.0, 0.0], *([s.fixed, s.per_sample] for s in saved)], axis=0)
        saved_runs = saved_sums[None, :] - saved_sums[:, None]
        memory = np.stack(
            [
                runs.held_bytes,
                saved_runs[:, :, 0],
                saved_runs[:, :, 1],
                tables.activations_in.fixed,
                tables.activations_in.per_sample,
                tables.tied_bytes[:, :, 0],
                tables.tied_bytes[:, :, 1],
            ],
            axis=2,
        )
        sizes = [float(layer.parameter_bytes) for layer in profile.layers]
        parameters = np.array([[*sizes, 0.0], np.cumsum([0.0, *sizes])])
        floors = [floor_of(layer.workspace_bytes, self.rows) for layer in profile.layers]
        workspace = np.array([[w.fixed for w in floors], [w.per_sample for w in floors]])
        return parameters, workspace, memory, self.relaxed.tables.all_traffic

    @property
    def table_bytes(self) -> float:
        """Bytes of `table`."""
        return 8.0 * len(self.options) * self.times.shape[1] ** 2 * len(TERMS)

    @cached_property
    def table(self) -> Floats:
        """`headroom` of every option, as `filled` it last."""
        layers = self.times.shape[1] - 1
        return np.empty((len(self.options), layers + 1, layers + 1, len(TERMS)))

    def filled(self, most_s: float) -> Floats:
        """The table, with all that plans need that take no longer than ``most_s``."""
        if most_s <= self.filled_s[0]:
            return self.table
        self.filled_s[0] = most_s
        tails = np.zeros((2, self.times.shape[1] - 1))
        question = np.array([*self.question, most_s])
        near, reader = self.near[0], self.relaxed.tables.near.reader[0]
        for entry, figures in zip(self.table, self.figures, strict=True):
            self.relaxed.fill(
                entry, *tails, figures, self.times, *self.sums, near, reader, question
            )
        return self.table

    @cached_property
    def question(self) -> Floats:
        """`QUESTION` of `penstock.plan.bound_headroom`."""
        problem, limits = self.relaxed.problem, self.relaxed.limits
        classes = self.relaxed.supply.classes
        fastest = max(c.speed for c in classes)
        best_speeds = sorted((d.speed for d in problem.cluster.devices), reverse=True)[: self.rows]
        return np.array(
            [
                self.batches,
                self.rows,
                limits.latency_s,
                problem.profile.step_s_per_byte,
                problem.recompute != "on",
                problem.recompute != "off",
                1 / fastest,
                self.rows / sum(best_speeds),
                limits.ring_rates[min(2, len(limits.ring_rates) - 1)],
                min(c.speed for c in classes) / fastest,
                not any(host.separate_links for host in problem.cluster.hosts),
            ]
        )

    def reached(self, limit_s: float) -> RelaxedPlan | None:
        """A relaxed plan that takes no more than ``limit_s``; none: no plan takes so little."""
        relaxed, limits = self.relaxed, self.relaxed.limits
        supply, layers = relaxed.supply, self.times.shape[1] - 1
        shape = (layers + 1, supply.states, len(relaxed.room), WIDTHS, relaxed.front)
        counts = np.zeros(shape[:-1], dtype=np.int64)
        points = np.empty((*shape, POINT))
        parents = np.empty((*shape, 2), dtype=np.int64)
        speeds = [c.speed for c in supply.classes]
        strides = np.array(supply.strides, dtype=np.int64)
        taken = np.array([option.taken for option in self.options], dtype=np.int64)
        places = [0 if o.placement.inside else 1 if o.placement.across else 2 for o in self.options]
        question = [
            self.batches,
            self.rows,
            limits.latency_s,
            1 / limits.best_rate,
            limits.across_latency_s,
            1 / limits.across_rate if limits.across_rate else 0.0,
            relaxed.problem.max_stages,
            min(speeds) / max(speeds),
            relaxed.tables.hub.producer,
            len(relaxed.problem.cluster.devices) > MANY_DEVICES,
        ]
        found = relaxed.reach(
            np.empty((KINDS, layers + 1, supply.states, WIDTHS)),
            counts,
            points,
            parents,
            self.filled(limit_s),
            taken @ strides,
            taken,
            self.figures,
            np.array(places, dtype=np.int64),
            relaxed.left,
            relaxed.used,
            relaxed.most_used,
            strides,
            relaxed.room,
            self.times,
            self.near,
            relaxed.tables.near.reader,
            relaxed.tables.near.passing,
            limits.there_and_back,
            relaxed.tables.all_traffic,
            relaxed.tables.hub.reader,
            relaxed.tables.hub.size,
            relaxed.capacity,
            np.array(question, dtype=np.float64),
            limit_s,
        )
        if found < 0:
            return None
        return RelaxedPlan(self.rows, self.stages(parents.reshape(-1, 2), found, shape), limit_s)

    def stages(
        self, parents: np.ndarray, found: int, shape: tuple[int, ...]
    ) -> tuple[RelaxedStage, ...]:
        """The stages on the way to a point."""
        stages: list[RelaxedStage] = []
        each = shape[4] * shape[3] * shape[2] * shape[1]
        while found >= each:
            before, option = (int(value) for value in parents[found])
            stages.append(RelaxedStage(range(before // each, found // each), self.options[option]))
            found = before
        return tuple(reversed(stages))


def least_relaxed(
    relaxed: Relaxation, floors_s: Mapping[int, float]
) -> tuple[float, RelaxedPlan | None]:
    """Seconds that no plan beats, and a relaxed plan that takes hardly more.

    ``floors_s`` are bounds known already for each micro-batch size. Where finer fronts know of no
    plan that is hardly slower, all is asked once more with them. Infinite seconds and no plan where
    nothing fits in memory.
    """
    finer = relaxed.finer
    lower_s, best = narrowed(relaxed, floors_s)
    if best is None or finer is relaxed or best.seconds <= LEAST_S * FIRST_STEP:
        return min(lower_s.values()), best
    limit_s = best.seconds * (1 + WORTH_FINER)
    if finer.of_size(best.micro_batch_size).reached(limit_s) is None:
        lower_s[best.micro_batch_size] = limit_s
        lower_s, best = narrowed(finer, lower_s)
    return min(lower_s.values()), best


def narrowed(
    relaxed: Relaxation, floors_s: Mapping[int, float]
) -> tuple[dict[int, float], RelaxedPlan | None]:
    """Bounds of all micro-batch sizes, and a relaxed plan that takes hardly more than the least.

    The size with about as many micro-batches as samples in each is narrowed down roughly (the next
    one where it has no plan); all others are asked for a plan that is clearly faster, and narrowed
    down one after the other where they have one; then the sizes that may still have a faster plan
    are narrowed down to `PRECISION`.
    """
    lower_s: dict[int, float] = dict(floors_s)
    best: RelaxedPlan | None = None
    batch = relaxed.problem.global_batch
    many = len(relaxed.problem.cluster.devices) > MANY_DEVICES
    precision, roughly = (MANY_PRECISION, MANY_PRECISION) if many else (PRECISION, ROUGHLY)
    order = sorted(floors_s, key=lambda rows: (abs(log(rows * rows / batch)), rows))
    while best is None and order:
        rows = order.pop(0)
        size = relaxed.of_size(rows)
        lower_s[rows], best = least_of_size(size, lower_s[rows], inf, max(roughly, ROUGHLY))
    if best is None:
        return lower_s, None
    best = faster_sizes(relaxed, order, lower_s, best, roughly)
    sizes = sorted(floors_s, key=lambda rows: (lower_s[rows], rows))
    return lower_s, faster_sizes(relaxed, sizes, lower_s, best, precision)


def faster_sizes(
    relaxed: Relaxation,
    sizes: Sequence[int],
    lower_s: dict[int, float],
    best: RelaxedPlan,
    precision: float,
) -> RelaxedPlan:
    """The best plan once no size has one that is faster by more than ``precision``.

    Raises the bounds ``lower_s`` of the sizes. Questions are asked side by side.
    """

    def has_faster(rows: int) -> bool:
        return relaxed.of_size(rows).reached(most_s) is not None

    if best.seconds <= LEAST_S * FIRST_STEP:
        return best
    most_s = best.seconds * (1 - precision)
    open_sizes = [rows for rows in sizes if lower_s[rows] < most_s]
    widest = relaxed.of_size(max(sizes)).table_bytes if open_sizes else 0
    with ThreadPoolExecutor(THREADS if widest <= MOST_BYTES else 1) as threads:
        answers = list(threads.map(has_faster, open_sizes))
    for rows, faster in zip(open_sizes, answers, strict=True):
        if not faster:
            lower_s[rows] = most_s
    for rows in (rows for rows, faster in zip(open_sizes, answers, strict=True) if faster):
        most_s = best.seconds * (1 - precision)
        if lower_s[rows] < most_s:
            size = relaxed.of_size(rows)
            lower_s[rows], found = least_of_size(size, lower_s[rows], most_s, precision)
            best = found or best
    return best


def least_of_size(
    sized: SizedRelaxation, floor_s: float, most_s: float, precision: float
) -> tuple[float, RelaxedPlan | None]:
    """`least_relaxed` of one size; ``most_s`` and no plan where that has none within ``most_s``.

    Without a limit, time is raised until there is a plan; then it is narrowed down by bisection,
    until the two are as close as ``precision`` says.
    """
    best, step = None, FIRST_STEP
    least_s = max(floor_s, LEAST_S)
    if most_s < inf:
        best = sized.reached(most_s)
        if best is None:
            return most_s, None
    while best is None and least_s < MOST_S:
        best = sized.reached(least_s * step)
        if best is None:
            least_s, step = least_s * step, min(step * step, LONGEST_STEP)
    if best is None:
        return inf, None
    while least_s < best.seconds * (1 - precision) and best.seconds > LEAST_S * FIRST_STEP:
        middle_s = sqrt(least_s * best.seconds)
        found = sized.reached(middle_s)
        best, least_s = found or best, least_s if found else middle_s
    return (least_s if least_s > LEAST_S else floor_s), best
