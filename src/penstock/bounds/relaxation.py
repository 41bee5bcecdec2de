"""A problem relaxed: the best of devices and links for every stage, and the question for a plan."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from penstock.bounds.headroom import FIGURES, TERMS, headroom
from penstock.bounds.links import LinkLimits, link_limits
from penstock.bounds.options import Option, Supply, device_supply, options_of
from penstock.bounds.reach import (
    FINE_FRONT,
    FRONT,
    FRONT_OF_MANY,
    SPREADS,
    WIDTHS,
)
from penstock.bounds.reach import reach as every_reach
from penstock.bounds.steps import POINT
from penstock.bounds.tables import ProfileTables, floor_of, profile_tables, time_sums
from penstock.bounds.trips import KINDS
from penstock.kernels import compiled
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import Floats

__all__ = [
    "MANY_DEVICES",
    "Relaxation",
    "RelaxedPlan",
    "RelaxedStage",
    "SizedRelaxation",
    "relaxation",
]

MANY_DEVICES = 64
"""On more devices than this each question takes long: fronts are short, and less is asked."""

MOST_KEPT_BYTES = 500e6
"""Tables of all sizes are kept for further questions until they take more room."""

MOST_FRONT_BYTES = 500e6
"""Fine fronts may take so much room."""

NEARLY = 1e-9
"""Sums of seconds may be off by so much of themselves."""

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
    sizes: dict[int, "SizedRelaxation"] = field(default_factory=dict[int, "SizedRelaxation"])

    @property
    def fronts(self) -> tuple[int, ...]:
        """How many points fronts have: at first, then where it is worth it and there is room."""
        if len(self.problem.cluster.devices) > MANY_DEVICES:
            return (FRONT_OF_MANY,)
        states = (len(self.problem.profile.layers) + 1) * self.supply.states * len(self.room)
        fits = states * WIDTHS * FINE_FRONT * POINT * 8 <= MOST_FRONT_BYTES
        return (FRONT, FINE_FRONT) if fits else (FRONT,)

    def of_size(self, rows: int) -> "SizedRelaxation":
        """The relaxation for micro-batches of ``rows`` samples."""
        sized = self.sizes.get(rows)
        if sized is None:
            kept_bytes = sum(other.filled[2].nbytes for other in list(self.sizes.values()))
            if kept_bytes > MOST_KEPT_BYTES:
                self.sizes.clear()
            sized = SizedRelaxation(self, rows, options_of(self.supply, self.limits, rows))
            self.sizes[rows] = sized
        return sized

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
    return Relaxation(
        problem,
        profile_tables(problem),
        limits,
        device_supply(problem.cluster, limits),
        fill or compiled(headroom),
        reach or compiled(every_reach),
    )


NOT_FILLED = -inf, np.empty((0, 0, 3), dtype=np.int64), np.empty((0, len(TERMS)))


@dataclass(eq=False)
class SizedRelaxation:
    """The relaxation of one micro-batch size, with the table that was filled last.

    ``filled``: the longest time that it serves, `runs` and their `headroom`.
    """

    relaxed: Relaxation
    rows: int
    options: tuple[Option, ...]
    filled: tuple[float, np.ndarray, Floats] = NOT_FILLED

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

    @cached_property
    def onto(self) -> np.ndarray:
        """For every option how far it leads in the states of the supply."""
        taken = np.array([option.taken for option in self.options], dtype=np.int64)
        return taken @ np.array(self.relaxed.supply.strides, dtype=np.int64)

    def runs(self, most_s: float) -> np.ndarray:
        """``runs[option, lo]`` of `headroom`: what plans that take no longer than ``most_s`` have.

        A run may not compute for longer than that, nor may all others on the devices it leaves.
        """
        (forward, row_forward, backward, row_backward), figures = self.times, self.figures
        fixed, by_row = forward + backward, row_forward + row_backward
        work = by_row * self.rows + fixed * self.least_speed_ratio
        layers = self.times.shape[1] - 1
        after = np.arange(1, layers + 1, dtype=np.int64)
        runs = np.empty((len(self.options), layers, 3), dtype=np.int64)
        for spans, row, onto in zip(runs, figures, self.onto, strict=True):
            alone_s = self.batches * (fixed * row[2] + by_row * row[0])
            longest = alone_s[:-1] + most_s + NEARLY * (most_s + alone_s[-1])
            left = work[-1] - most_s * self.relaxed.capacity[onto] / self.batches
            least = work[:-1] + left - NEARLY * work[-1]
            spans[:, 0] = np.maximum(work.searchsorted(least, "left"), after)
            spans[:, 1] = np.maximum(alone_s.searchsorted(longest, "right"), spans[:, 0])
        counts = (runs[:, :, 1] - runs[:, :, 0]).ravel()
        runs[:, :, 2] = (np.cumsum(counts) - counts).reshape(runs.shape[:2])
        return runs

    def table_bytes(self, most_s: float) -> float:
        """Bytes of `table` for plans within ``most_s``."""
        return 8.0 * len(TERMS) * counted(self.runs(most_s))

    def table(self, most_s: float) -> tuple[np.ndarray, Floats]:
        """`runs` and their `headroom`, or those that were filled for longer times."""
        if most_s > self.filled[0]:
            runs = self.runs(most_s)
            entries = np.empty((counted(runs), len(TERMS)))
            tails = np.zeros((2, self.times.shape[1] - 1))
            near, reader = self.near[0], self.relaxed.tables.near.reader[0]
            for spans, figures in zip(runs, self.figures, strict=True):
                self.relaxed.fill(
                    entries, spans, *tails, figures, self.times, *self.sums, near, reader,
                    self.question,
                )  # fmt: skip
            self.filled = most_s, runs, entries
        return self.filled[1:]

    def terms(self, stage: RelaxedStage, most_s: float) -> Floats:
        """`headroom` of a stage of a relaxed plan that takes no longer than ``most_s``."""
        runs, entries = self.table(most_s)
        first, _, place = runs[self.options.index(stage.option), stage.layers.start]
        return entries[place + stage.layers.stop - first]

    @cached_property
    def least_speed_ratio(self) -> float:
        """The speed of the slowest device by that of the fastest."""
        speeds = [c.speed for c in self.relaxed.supply.classes]
        return min(speeds) / max(speeds)

    @cached_property
    def question(self) -> Floats:
        """`QUESTION` of `penstock.bounds.headroom`."""
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
                not any(host.separate_links for host in problem.cluster.hosts),
            ]
        )

    def reached(self, limit_s: float, front: int) -> RelaxedPlan | None:
        """A relaxed plan that takes no more than ``limit_s``; none: no plan takes so little.

        On fronts of so many points: with more of them fewer relaxed plans are too good to be true.
        """
        relaxed, limits = self.relaxed, self.relaxed.limits
        supply, layers = relaxed.supply, self.times.shape[1] - 1
        shape = (layers + 1, supply.states, len(relaxed.room), WIDTHS, front)
        counts = np.zeros(shape[:-1], dtype=np.int64)
        points = np.empty((*shape, POINT))
        parents = np.empty((*shape, 2), dtype=np.int64)
        runs, entries = self.table(limit_s)
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
            self.least_speed_ratio,
            relaxed.tables.hub.producer,
            len(relaxed.problem.cluster.devices) > MANY_DEVICES,
        ]
        found = relaxed.reach(
            np.empty((KINDS, layers + 1, supply.states, WIDTHS)),
            counts,
            points,
            parents,
            runs,
            entries,
            self.onto,
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


def counted(runs: np.ndarray) -> int:
    """How many `SizedRelaxation.runs` there are of all options."""
    return int((runs[:, :, 1] - runs[:, :, 0]).sum())
