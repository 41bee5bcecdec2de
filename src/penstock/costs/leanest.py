"""Search by memory alone for any pipeline that fits, fast for a thousand devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Device
from penstock.costs.run_tables import Integers, at, runs_at
from penstock.costs.stage_costs import depth_function
from penstock.costs.tables import ChainCosts
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.row_split import split_rows
from penstock.schedule.registry import FAMILIES

ALL_WIDTHS = 32
"""Stages of up to this number of replicas are tried at every width, wider ones by doubling."""

MOST_WORK = 2_000_000_000
"""`all_runs` is tried if devices, widths, stages and pairs of layers are no more than this."""

Run: TypeAlias = tuple[range, range]
"""The layers of a stage, and the positions of its devices."""

Load: TypeAlias = frozenset[tuple[int, float, int]]
"""Kinds of a window's devices: rows, bytes of memory, number of devices that share the stage."""


@dataclass(frozen=True)
class DeviceWindows:
    """The windows of ``width`` neighbouring devices: the kind of each, by position.

    ``loads`` are those of each kind.
    """

    width: int
    kinds: Integers
    loads: tuple[Load, ...]


def leanest(
    problem: PlanningProblem, chain: ChainCosts, devices: Sequence[Device] | None = None
) -> Plan | None:
    """A plan of as few stages as possible that fits with the smallest micro-batches, or None.

    ``devices`` replace the cluster's. Stages are made from the last to the first, on neighbouring
    devices. `quick_runs` looks only at the longest rests of the model that fit, and finds a plan
    for a thousand devices in time linear in devices, stages and widths. It can overlook a plan in
    which a stage must be short, so `all_runs` looks again where the problem is small enough.
    """
    devices = problem.cluster.devices if devices is None else devices
    size, layers = min(problem.micro_batch_sizes), len(problem.profile.layers)
    micro_batches = problem.global_batch // size
    known = [name for name in problem.schedules if FAMILIES[name].is_planned]
    schedule = "1f1b" if "1f1b" in known or not known else known[0]
    depth = depth_function(schedule)
    first: dict[Device, int] = {}
    kinds = [first.setdefault(device, len(first)) for device in devices]
    windows = [windows_of_devices(devices, kinds, size, w) for w in widths_for(size, len(devices))]
    most = min(len(devices), layers, problem.max_stages or layers)
    depths = [depth(stages, micro_batches) for stages in range(1, most + 1)]
    search = LeanestSearch(problem, chain, devices, windows, depths)
    runs = search.quick_runs()
    if not runs and len(devices) * len(windows) * most * layers**2 <= MOST_WORK:
        runs = search.all_runs()
    if not runs:
        return None
    parts = tuple(map(search.stage_of, runs, reversed(depths[: len(runs)])))
    return Plan(parts, micro_batches, size, schedule)


@dataclass(frozen=True)
class LeanestSearch:
    """A search on devices in their order; ``chain`` may have the costs of a stricter problem.

    ``depths[k - 1]`` are the micro-batches in flight of a stage with ``k`` from it to the end.
    """

    problem: PlanningProblem
    chain: ChainCosts
    devices: Sequence[Device]
    windows: list[DeviceWindows]
    depths: Sequence[int]

    def quick_runs(self) -> list[Run]:
        """The layers and devices of each stage; empty if none are found.

        A run of layers ``lo..hi-1`` that fits mostly fits without its last layers too. So for ``k``
        stages from position ``p`` it looks only at the least first layer:

            m(k, p) = min over widths r of  the least lo with lo .. m(k-1, p+r) - 1 on r devices

        Equal windows share their tables.
        """
        # Behind the last layer nothing is left; one further stands for "cannot be reached".
        reached = [np.full(len(self.devices) + 1, len(self.problem.profile.layers), dtype=np.int64)]
        chosen: list[Integers] = []
        for depth in self.depths:
            lows, widths = self.extended(reached[-1], depth)
            reached.append(lows)
            chosen.append(widths)
            if not lows.min():
                return traced(reached, chosen)
            if not (lows[:-1] < reached[-2][:-1]).any():
                return []
        return []

    def all_runs(self) -> list[Run]:
        """The same, exactly: of all first layers from which the rest of the model fits.

        Stage by stage it marks, for each position, every layer from which the stages so far reach
        the end. Each mark is checked against all ends of the stage before it.
        """
        ends = np.arange(len(self.problem.profile.layers) + 1, dtype=np.int64)
        marks = [np.zeros((len(self.devices) + 1, len(ends)), dtype=bool)]
        marks[0][:, -1] = True
        for depth in self.depths:
            found = np.zeros_like(marks[0])
            for group in self.windows:
                tables = np.stack([self.runs_that_fit(w, depth, ends) for w in group.loads])
                for position, kind in enumerate(group.kinds):
                    found[position] |= (tables[kind] & marks[-1][position + group.width]).any(
                        axis=1
                    )
            marks.append(found)
            if found[:, 0].any():
                return self.followed(marks)
        return []

    def followed(self, marks: list[NDArray[np.bool_]]) -> list[Run]:
        """The stages along the marks of `all_runs`, from the first device that can hold layer 0."""
        runs: list[Run] = []
        ends = np.arange(marks[0].shape[1], dtype=np.int64)
        position, lo = int(marks[-1][:, 0].argmax()), 0
        for stages in range(len(marks) - 1, 0, -1):
            for group in self.windows:
                after = position + group.width
                if after >= len(marks[0]):
                    continue
                load = group.loads[int(group.kinds[position])]
                fits = self.runs_that_fit(load, self.depths[stages - 1], ends)[lo]
                if (fits & marks[stages - 1][after]).any():
                    hi = int((fits & marks[stages - 1][after]).argmax())
                    runs.append((range(lo, hi), range(position, after)))
                    position, lo = after, hi
                    break
        return runs

    def extended(self, before: Integers, depth: int) -> tuple[Integers, Integers]:
        """The least first layer from every position with one stage more, and that stage's width."""
        none = len(self.problem.profile.layers) + 1
        ends, places = np.unique(before, return_inverse=True)
        lows, widths = np.full(len(before), none), np.zeros(len(before), dtype=np.int64)
        for group in self.windows:
            fits = np.stack([self.runs_that_fit(load, depth, ends) for load in group.loads])
            # The least first layer of a run that fits, by kind and end.
            found = np.where(fits.any(axis=1), fits.argmax(axis=1), none)
            here = found[group.kinds, places[group.width :]]
            better = here < lows[: len(here)]
            lows[: len(here)][better] = here[better]
            widths[: len(here)][better] = group.width
        return lows, widths

    def stage_of(self, run: Run, depth: int) -> Stage:
        """A stage of layers on devices; with recompute where it must be."""
        layers, places = run
        rows = split_rows(
            min(self.problem.micro_batch_sizes), [self.devices[i].speed for i in places]
        )
        end = np.array([layers.stop])
        ways = [
            [bool(fits[layers.start, 0]) for fits in self.fitting(load, depth, end)]
            for load in {
                (n, self.devices[i].memory_bytes, len(places))
                for i, n in zip(places, rows, strict=True)
            }
        ]
        first = [all(way) for way in zip(*ways, strict=True)].index(True)
        whole, by_block = self.ways_to_recompute(depth)[first]
        return Stage(layers, tuple(places), rows, recompute=whole, by_block=by_block)

    def ways_to_recompute(self, depth: int) -> list[tuple[bool, bool]]:
        """Pairs of recompute as a whole, and by block, that are allowed and save memory."""
        first, *others = self.problem.recompute_ways
        return [first, *(way for way in others if way != (True, False) or depth > 1)]

    def runs_that_fit(self, load: Load, depth: int, ends: Integers) -> NDArray[np.bool_]:
        """Return whether layers from each first one (rows) to each end (columns) fit a window."""
        layers = len(self.problem.profile.layers)
        real = np.minimum(ends, layers)
        # All devices of a stage do the same.
        ways = zip(*(self.fitting(one, depth, real) for one in sorted(load)), strict=True)
        fits = np.logical_or.reduce([np.logical_and.reduce(way) for way in ways])
        return fits & (np.arange(layers + 1)[:, None] < real) & (ends <= layers)

    def fitting(
        self, load: tuple[int, float, int], depth: int, ends: Integers
    ) -> list[NDArray[np.bool_]]:
        """Masks of the runs to ``ends`` that fit in each of the `ways_to_recompute`.

        ``load`` is that of a device. The formula is `device_memory_bytes` of `stage_costs`.
        """
        rows, memory_bytes, replicas = load
        tables = self.chain.runs
        saved = runs_at(tables.saved, rows)[:, ends]
        held = tables.held_by(replicas)[:, ends] + self.chain.workspace(rows)[:, ends]
        found: list[NDArray[np.bool_]] = []
        for whole, by_block in self.ways_to_recompute(depth):
            if by_block:
                chain = self.chain.by_block
                found += replace(self, problem=chain.problem, chain=chain).fitting(
                    load, depth, ends
                )
            elif whole and depth > 1:
                inputs = at(tables.inputs[:, :, ends], rows)
                found.append(
                    held + (depth - 1) * inputs + np.maximum(saved, inputs) <= memory_bytes
                )
            else:
                found.append(held + depth * saved <= memory_bytes)
        return found


def widths_for(size: int, devices: int) -> list[int]:
    """Numbers of replicas that a stage may have: at most the rows of a micro-batch, or devices."""
    most = min(size, devices)
    doubled = [2**k for k in range(most.bit_length()) if 2**k > ALL_WIDTHS]
    return sorted({*range(1, min(most, ALL_WIDTHS) + 1), *doubled, most})


def windows_of_devices(
    devices: Sequence[Device], device_kinds: Sequence[int], size: int, width: int
) -> DeviceWindows:
    index: dict[Load, int] = {}
    known: dict[tuple[int, ...], int] = {}
    kinds: list[int] = []
    for position in range(len(devices) - width + 1):
        names = tuple(device_kinds[position : position + width])
        if names not in known:
            window = devices[position : position + width]
            rows = split_rows(size, [device.speed for device in window])
            pairs = zip(rows, window, strict=True)
            load = frozenset((own, device.memory_bytes, width) for own, device in pairs)
            known[names] = index.setdefault(load, len(index))
        kinds.append(known[names])
    return DeviceWindows(width, np.array(kinds, dtype=np.int64), tuple(index))


def traced(reached: list[Integers], chosen: list[Integers]) -> list[Run]:
    """Layers and devices of each stage, from the first device with which layer 0 is reached."""
    runs: list[Run] = []
    position, lo = int(reached[-1].argmin()), 0
    for stages in range(len(chosen), 0, -1):
        after = position + int(chosen[stages - 1][position])
        hi = int(reached[stages - 1][after])
        runs.append((range(lo, hi), range(position, after)))
        position, lo = after, hi
    return runs


def device_orders(problem: PlanningProblem) -> tuple[tuple[int, ...], ...]:
    """The cluster's own order; and, where speeds differ, that order without the slowest devices."""
    devices = problem.cluster.devices
    speeds = sorted({device.speed for device in devices})
    return tuple(
        tuple(i for i, device in enumerate(devices) if device.speed >= least) for least in speeds
    )
