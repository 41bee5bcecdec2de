"""What runs of layers cost on one window of devices: the tables that the dynamic program reads."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.collectives import all_reduce_ways, message_resources, row_messages
from penstock.plan.cost import crowding, rows_by_speed
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import (
    AffineTable,
    Floats,
    RunTables,
    crossing_table,
    workspace_table,
)

__all__ = ["CostSource", "TransferCosts", "Window", "WindowCosts"]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive devices of an order, with the rows that each computes of a micro-batch."""

    devices: tuple[int, ...]
    slices: tuple[int, ...]


@dataclass(frozen=True)
class WindowCosts:
    """For every run of layers ``[lo, hi]`` on one window.

    ``kept_depth`` and ``recompute_depth``: the most micro-batches in flight that fit in the memory
    of every device of the window, with all activations kept and with recompute; 0 where none fits.
    """

    forward_s: Floats
    busy_s: Floats
    tail_s: Floats
    kept_depth: NDArray[np.int64]
    recompute_depth: NDArray[np.int64]


@dataclass(frozen=True)
class TransferCosts:
    """For every cut the seconds of the busier direction, and of both one after the other."""

    busier_s: Floats
    round_trip_s: Floats


@dataclass
class CostSource:
    """Costs on windows for one micro-batch size; windows of equal devices share their tables.

    ``cuts`` are the places where stages may begin and end; none for all.
    """

    problem: PlanningProblem
    tables: RunTables
    micro_batch_size: int
    cuts: tuple[int, ...] = ()
    workspaces: dict[int, Floats] = field(default_factory=dict[int, Floats])
    known: dict[object, WindowCosts] = field(default_factory=dict[object, WindowCosts])

    def __post_init__(self) -> None:
        profile = self.problem.profile
        every_cut = tuple(range(len(profile.layers) + 1))
        self.cuts = self.cuts or every_cut
        activations = crossing_table(profile, lambda edge: edge.bytes)
        gradients = crossing_table(profile, lambda edge: edge.gradient_bytes)
        chosen = list(self.cuts)
        self.activations = (activations.fixed[chosen], activations.per_sample[chosen])
        self.gradients = (gradients.fixed[chosen], gradients.per_sample[chosen])
        if self.cuts != every_cut:
            self.tables = self.tables.at_cuts(self.cuts)

    def window(self, devices: tuple[int, ...]) -> Window:
        """A window with rows in proportion to the speeds of its devices."""
        return Window(devices, rows_by_speed(self.problem.cluster, devices, self.micro_batch_size))

    def costs(self, window: Window) -> WindowCosts:
        """What every run of layers costs on ``window``."""
        cluster = self.problem.cluster
        devices = [cluster.devices[device] for device in window.devices]
        loads = {(n, d.speed, d.memory_bytes) for n, d in zip(window.slices, devices, strict=True)}
        ways = all_reduce_ways(cluster, window.devices)
        crowd = crowding(cluster, window.devices)
        key = (frozenset(loads), ways, crowd)
        if key not in self.known:
            step_s = self.problem.profile.step_s_per_byte / min(d.speed for d in devices)
            size_bytes = self.tables.parameter_bytes
            reduce_s = [way.latency_s + way.s_per_byte * size_bytes for way in ways]
            reduced = np.where(size_bytes > 0, np.minimum.reduce(reduce_s), 0.0) if ways else 0.0
            forward_s = crowd * slowest_s(self.tables.forward_s, loads)
            self.known[key] = WindowCosts(
                forward_s=forward_s,
                busy_s=forward_s + crowd * slowest_s(self.tables.backward_s, loads),
                tail_s=reduced + step_s * size_bytes,
                kept_depth=self.depth(loads, recompute=False),
                recompute_depth=self.depth(loads, recompute=True),
            )
        return self.known[key]

    def depth(self, loads: set[tuple[int, float, float]], *, recompute: bool) -> NDArray[np.int64]:
        """The most micro-batches in flight that fit on the fullest device (see `cost`)."""
        forbidden = {"on": False, "auto": None, "off": True}[self.problem.recompute]
        if forbidden is recompute:
            return np.zeros(self.tables.held_bytes.shape, dtype=np.int64)
        depths = [self.depth_on(rows, memory, recompute) for rows, _, memory in sorted(loads)]
        return np.minimum.reduce(depths).astype(np.int64)

    def depth_on(self, rows: int, memory_bytes: float, recompute: bool) -> Floats:
        """The depth on one device that computes ``rows`` rows of each micro-batch."""
        if rows not in self.workspaces:
            square = np.ix_(self.cuts, self.cuts)
            self.workspaces[rows] = workspace_table(self.problem.profile, rows)[square]
        saved = self.tables.saved_bytes.at(rows)
        held = self.tables.held_bytes + self.workspaces[rows]
        each = self.tables.input_bytes.at(rows) if recompute else saved
        once = held + np.maximum(saved - each, 0.0)
        most = float(self.problem.global_batch // self.micro_batch_size)
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.floor((memory_bytes - once) / each)
        depth = np.clip(np.where(each > 0, depth, most), 0.0, most)
        depth -= once + depth * each > memory_bytes
        # A single micro-batch in flight keeps everything: its inputs are not held on their own.
        return np.where(held + saved <= memory_bytes, np.maximum(depth, 1.0), 0.0)

    def transfers(self, sender: Window, receiver: Window) -> TransferCosts:
        """Seconds between two windows for every cut of the chain."""
        down_s = self.one_way_s(sender, receiver, gradients=False)
        up_s = self.one_way_s(receiver, sender, gradients=True)
        return TransferCosts(busier_s=np.maximum(down_s, up_s), round_trip_s=down_s + up_s)

    def one_way_s(self, sender: Window, receiver: Window, *, gradients: bool) -> Floats:
        """`split_concat_s` for every cut: the busiest resource, affine in the bytes of a row."""
        cluster = self.problem.cluster
        loads: dict[tuple[str, int], tuple[float, float, float]] = {}
        for message in row_messages(
            sender.devices, sender.slices, receiver.devices, receiver.slices
        ):
            latency_s = cluster.latency(message.source, message.target)
            s_per_byte = 1 / cluster.bandwidth(message.source, message.target)
            for resource in message_resources(cluster, message):
                latency, tensors, rows = loads.get(resource, (0.0, 0.0, 0.0))
                rows += message.rows * s_per_byte
                loads[resource] = (latency + latency_s, tensors + s_per_byte, rows)
        fixed, per_sample = self.gradients if gradients else self.activations
        seconds = np.zeros(len(fixed))
        for latency_s, tensors, rows in set(loads.values()):
            seconds = np.maximum(seconds, latency_s + tensors * fixed + rows * per_sample)
        return np.where(fixed + per_sample > 0, seconds, 0.0)


def slowest_s(table: AffineTable, loads: set[tuple[int, float, float]]) -> Floats:
    """The time of the slowest replica for every run."""
    kinds = sorted({(rows, speed) for rows, speed, _ in loads})
    kinds = [kind for kind in kinds if not any(outlasts(other, kind) for other in kinds)]
    return np.maximum.reduce([table.at(rows) / speed for rows, speed in kinds])


def outlasts(other: tuple[int, float], kind: tuple[int, float]) -> bool:
    """Whether a replica has at least the rows of another at no higher speed, and differs."""
    return other != kind and other[0] >= kind[0] and other[1] <= kind[1]
