"""The times of a visit: a run of layers on a number of replicas, with micro-batches of one size.

A *visit* is what a micro-batch does between two changes of devices. Consecutive stages on the same
devices are one visit. All values are the least over what a visit leaves open: which devices, which
rows, which order.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.bounds.links import LinkLimits
from penstock.bounds.shortened_chain import PrefixSums, ShortenedChain, Tensor
from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import Floats, of_runs, prefix_sums
from penstock.schedule.registry import FAMILIES

__all__ = [
    "Replicas",
    "Setting",
    "Traffic",
    "VisitTimes",
    "full_speeds",
    "has_whole_backwards",
    "may_be_mirrored",
    "recompute_s",
    "reduce_s",
    "replica_counts",
    "visit_times",
]

SINGLE_COUNTS = 16
"""Every number of replicas up to this is tried; larger ones in groups that grow by half."""


MEMORY_ROUNDING, LEAST_RATE = 1e-9, 1e-6
"""Memory that is short by a smaller share counts as enough. Recompute that frees fewer bytes a
second counts as free of charge."""


@dataclass(frozen=True)
class Replicas:
    """``fewest`` to ``most`` replicas: as cheap as the fewest, and as fast as the most."""

    fewest: int
    most: int


@dataclass(frozen=True)
class Traffic:
    """What a micro-batch sends to every run of layers, and what it sends on from there.

    ``first_visit``: the tensors of all earlier layers, to devices that hold none of them.
    ``revisit``: the tensors of the layer right before, to devices that may hold all others.
    ``out``: the tensors for the layer right behind. ``hop``: the bytes of the tensors from the
    layer before each cut to the layer behind it.
    """

    first_visit: "Passed"
    revisit: "Passed"
    out: "Passed"
    hop: PrefixSums


@dataclass(frozen=True)
class Passed:
    """Bytes of activations down and of gradients up; the fewest messages of each on a device."""

    down: PrefixSums
    up: PrefixSums
    down_count: Floats
    up_count: Floats


@dataclass(frozen=True)
class Setting:
    """A problem with one micro-batch size on a shortened chain."""

    problem: PlanningProblem
    chain: ShortenedChain
    limits: LinkLimits
    speeds: tuple[float, ...]
    rows: int

    @property
    def micro_batches(self) -> int:
        """How many micro-batches an iteration has."""
        return self.problem.global_batch // self.rows

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.problem.cluster.devices)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes and messages of every run of the chain's layers."""
        return traffic_of(self.chain)

    @cached_property
    def whole_backwards(self) -> bool:
        """Whether all schedules have whole backwards and one stage a device."""
        return has_whole_backwards(self.problem)

    @cached_property
    def speed_sums(self) -> Floats:
        """The sum of the speeds of the 0, 1, ... fastest devices for which hosts have cores."""
        rest = [0.0] * (self.devices - len(self.speeds))
        return np.concatenate(([0.0], np.cumsum([*self.speeds, *rest])))

    @cached_property
    def links_apart(self) -> bool:
        """Whether messages may use other links than the engines that all-reduces use."""
        return any(host.separate_links for host in self.problem.cluster.hosts)

    @cached_property
    def all_forwards_s(self) -> float:
        """The least seconds in which all devices together do all forwards of the layers left."""
        forward, per_batch = self.chain.forward, self.problem.global_batch
        work = forward.fixed[-1] * self.micro_batches + forward.per_row[-1] * per_batch
        return float(work / self.speed_sums[-1])


@dataclass(frozen=True)
class VisitTimes:
    """Seconds of every run (first layer, cut after the last) on some replicas.

    ``compute`` and the messages are means over the devices, for all micro-batches of the visit. The
    messages are those of a ``first_visit`` or of a ``revisit`` (`Traffic`). ``reduce`` is the
    all-reduce of the gradients. ``work`` and ``recompute_s`` are summed over the devices, in
    seconds of a device of speed 1. ``recompute_s`` is infinite where memory does not allow the run.
    """

    work: Floats
    compute: Floats
    first_visit: "Links"
    revisit: "Links"
    reduce: Floats
    recompute_s: Floats


class Links(NamedTuple):
    """Seconds in which one device receives, and sends, all messages of a visit."""

    receive: Floats
    send: Floats


def replica_counts(most: int) -> tuple[Replicas, ...]:
    """Numbers of replicas up to ``most``, large ones in groups.

    >>> [(c.fewest, c.most) for c in replica_counts(40)][-4:]
    [(16, 16), (17, 25), (26, 39), (40, 40)]
    """
    counts = [Replicas(n, n) for n in range(1, min(most, SINGLE_COUNTS) + 1)]
    while counts[-1].most < most:
        first = counts[-1].most + 1
        counts.append(Replicas(first, min(most, first + first // 2)))
    return tuple(counts)


def traffic_of(chain: ShortenedChain) -> Traffic:
    """Bytes and messages of every run of a chain's layers."""
    cuts = len(chain.layers) + 1
    first_visit, revisit, out = (PassedBuilder(cuts) for _ in range(3))
    hop = PrefixSums(np.zeros(cuts), np.zeros(cuts))
    for tensor in chain.tensors:
        readers = np.array(tensor.consumers)
        for lo in range(tensor.producer + 1, int(readers[-1]) + 1):
            reader = int(readers[np.searchsorted(readers, lo)])
            first_visit.add(tensor, np.s_[lo, reader + 1 :])
            if lo == tensor.producer + 1:
                revisit.add(tensor, np.s_[lo, reader + 1 :])
                if reader == lo:
                    hop.fixed[lo] += tensor.bytes.fixed
                    hop.per_row[lo] += 0.0 if tensor.whole else tensor.bytes.per_sample
        for reader in tensor.consumers:
            out.add(tensor, np.s_[: tensor.producer + 1, reader])
    return Traffic(first_visit.passed(), revisit.passed(), out.passed(), hop)


class PassedBuilder:
    """Adds up tensors for runs of layers."""

    def __init__(self, cuts: int) -> None:
        self.tables = [np.zeros((cuts, cuts)) for _ in range(6)]

    def add(self, tensor: Tensor, runs: tuple[int | slice, int | slice]) -> None:
        """Count a tensor for ``runs``."""
        down, up = tensor.bytes, tensor.gradient_bytes
        per_row = 0.0 if tensor.whole else 1.0
        values = (
            down.fixed,
            down.per_sample * per_row,
            up.fixed,
            up.per_sample * per_row,
            float(down.fixed + down.per_sample > 0),
            float(up.fixed + up.per_sample > 0),
        )
        for table, value in zip(self.tables, values, strict=True):
            table[runs] += value

    def passed(self) -> Passed:
        """The sums."""
        down_fixed, down_row, up_fixed, up_row, down_count, up_count = self.tables
        return Passed(
            PrefixSums(down_fixed, down_row), PrefixSums(up_fixed, up_row), down_count, up_count
        )


def visit_times(
    setting: Setting, replicas: Replicas, micro_batches: float, sums_over: int
) -> VisitTimes:
    """The times of visits of ``micro_batches`` micro-batches to ``replicas``.

    Gradients are summed over ``sums_over`` devices.
    """
    chain, traffic, limits = setting.chain, setting.traffic, setting.limits
    few, most, rows = replicas.fewest, replicas.most, setting.rows
    costs = chain.work.runs
    parameter_bytes = of_runs(chain.parameter_bytes)
    step_s = setting.problem.profile.step_s_per_byte * parameter_bytes
    work = micro_batches * (few * costs.fixed + rows * costs.per_row) + few * step_s
    speed = setting.speed_sums[most]

    def links(into: Passed) -> Links:
        out, latency_s = traffic.out, limits.latency_s
        received = few * into.down.fixed + out.up.fixed
        received = received + rows * (into.down.per_row + out.up.per_row)
        sent = few * into.up.fixed + out.down.fixed
        sent = sent + rows * (into.up.per_row + out.down.per_row)
        received_s = received / limits.receive_rates[most] + latency_s * into.down_count
        sent_s = sent / limits.send_rates[most] + latency_s * into.up_count
        return Links(micro_batches * received_s, micro_batches * sent_s)

    return VisitTimes(
        work,
        work / speed if speed > 0 else np.full_like(work, np.inf),
        links(traffic.first_visit),
        links(traffic.revisit),
        reduce_s(limits, sums_over, parameter_bytes),
        recompute_s(setting, replicas, micro_batches),
    )


def recompute_s(setting: Setting, replicas: Replicas, micro_batches: float) -> Floats:
    """What every run must recompute, summed over the devices, in seconds of a device of speed 1.

    After the last forward of a micro-batch, a device keeps all activations that the visit saves of
    it, or recomputes them. The mean device has ``b / r`` rows. The result is infinite where the
    parameters and the rows of one layer do not fit on the largest device, or where recompute is not
    allowed. Let ``g`` be the bytes that all layers save for each second of their forwards. A layer
    saves at most ``g`` times its forward, and a rest. So a second of recompute frees ``g`` bytes,
    beside the rest of all layers.
    """
    chain, problem, rows = setting.chain, setting.problem, setting.rows / replicas.most
    copies = 2 + problem.optimizer_bytes_per_parameter_byte
    largest = max(device.memory_bytes for device in problem.cluster.devices) * (1 + MEMORY_ROUNDING)
    room = largest - copies * of_runs(chain.parameter_bytes) - of_runs(chain.buffer_bytes)
    saved = np.diff(chain.saved.fixed + rows * chain.saved.per_row)
    over = of_runs(prefix_sums(saved)) - room
    if problem.recompute == "off":
        return np.where(over > 0, np.inf, 0.0)
    forward = np.diff(chain.forward.fixed + rows * chain.forward.per_row)
    rate = saved.sum() / forward.sum() if forward.sum() > 0 else 0.0
    # A layer's rest is at most the rest of its fixed part plus the rest of its rows.
    for bytes_of, forward_of, count in (
        (chain.saved.fixed, chain.forward.fixed, 1.0),
        (chain.saved.per_row, chain.forward.per_row, rows),
    ):
        rest = np.maximum(0.0, np.diff(bytes_of) - rate * np.diff(forward_of))
        over -= count * of_runs(prefix_sums(rest))
    each = replicas.fewest * micro_batches / rate if rate > LEAST_RATE else 0.0
    return np.where(most_of_runs(saved) > room, np.inf, np.maximum(over, 0.0) * each)


def most_of_runs(values: Floats) -> Floats:
    """The largest value of the layers of every run."""
    most = np.zeros((len(values) + 1,) * 2)
    for lo in range(len(values)):
        most[lo, lo + 1 :] = np.maximum.accumulate(values[lo:])
    return most


def reduce_s(limits: LinkLimits, devices: int, parameter_bytes: Floats) -> Floats:
    """The least seconds of an all-reduce of gradients in buckets, by any algorithm for each."""
    costs = limits.least_all_reduce_costs(devices)
    if not costs:
        return np.zeros_like(parameter_bytes)
    latency_s = min(cost.latency_s for cost in costs)
    s_per_byte = min(cost.s_per_byte for cost in costs)
    return np.ceil(parameter_bytes / BUCKET_BYTES) * latency_s + s_per_byte * parameter_bytes


def has_whole_backwards(problem: PlanningProblem) -> bool:
    """Whether all schedules allowed have whole backwards and one stage a device."""
    return all(FAMILIES[name].is_planned for name in problem.schedules)


def may_be_mirrored(problem: PlanningProblem) -> bool:
    """Whether a schedule allowed holds every stage twice."""
    return any(FAMILIES[name].placement == "mirrored" for name in problem.schedules)


def full_speeds(cluster: Cluster) -> list[float]:
    """Speeds of the devices that can compute at full speed at once, fastest first."""
    speeds: list[float] = []
    for host in cluster.hosts:
        of_host = sorted((device.speed for device in host.devices), reverse=True)
        speeds += of_host[: host.full_speed_devices or len(of_host)]
    return sorted(speeds, reverse=True)
