"""What a visit takes: a run of layers on a number of replicas, with micro-batches of one size.

A *visit* is what a micro-batch does between two changes of devices: consecutive stages on the same
devices are one. All values are the least over everything that a visit leaves open: which devices,
which rows, which orders.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.bounds.links import LinkLimits
from penstock.bounds.shortened_chain import PrefixSums, ShortenedChain, Tensor
from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.plan.problem import PlanningProblem
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
    "runs",
    "visit_times",
]

Floats = npt.NDArray[np.float64]

SINGLE_COUNTS = 16
"""Up to so many replicas every number is looked at; beyond, numbers in groups that grow by half."""


MEMORY_ROUNDING, LEAST_RATE = 1e-9, 1e-6
"""Memory that is short by less counts as enough; so few bytes a second free nothing."""


@dataclass(frozen=True)
class Replicas:
    """``fewest`` to ``most`` replicas, charged as the former and as fast as the latter."""

    fewest: int
    most: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that a micro-batch brings to a run of layers and takes from it, and messages.

    ``fresh``: to devices that hold nothing before, all tensors of earlier layers; ``again``: to
    devices that may hold all but the layer right before, those of that layer. ``out``: to the
    layer right behind. Each down and up, fixed and per row as sums of `PrefixSums`; ``count`` is
    how many messages of them every device takes part in.
    """

    fresh: "Passed"
    again: "Passed"
    out: "Passed"
    hop: PrefixSums


@dataclass(frozen=True)
class Passed:
    """Bytes down and up, and how many messages of each a device has at least."""

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
    def whole(self) -> bool:
        """Whether only whole backwards with one stage a device are asked for."""
        return has_whole_backwards(self.problem)

    @cached_property
    def speed_sums(self) -> Floats:
        """The speeds of the 0, 1, ... fastest devices together, where hosts have cores for them."""
        rest = [0.0] * (self.devices - len(self.speeds))
        return np.concatenate(([0.0], np.cumsum([*self.speeds, *rest])))

    @cached_property
    def links_apart(self) -> bool:
        """Whether messages may pass beside the engines that all-reduces use."""
        return any(host.separate_links for host in self.problem.cluster.hosts)

    @cached_property
    def all_forwards_s(self) -> float:
        """Seconds below which not all forwards of the layers left are done anywhere."""
        forward, per_batch = self.chain.forward, self.problem.global_batch
        work = forward.fixed[-1] * self.micro_batches + forward.per_row[-1] * per_batch
        return float(work / self.speed_sums[-1])


@dataclass(frozen=True)
class VisitTimes:
    """Figures of every run (first layer, cut after the last) on some replicas, in seconds.

    Means over its devices, for all micro-batches that it sees: ``compute``, and messages of devices
    that hold nothing before (``fresh``) or may (``again``); ``reduce`` is the all-reduce of its
    gradients. ``work`` is in seconds of a device of speed 1, over all devices; so is ``again_s``,
    what has to be computed again, infinite where memory does not allow the run.
    """

    work: Floats
    compute: Floats
    fresh: "Links"
    again: "Links"
    reduce: Floats
    again_s: Floats


class Links(NamedTuple):
    """Seconds in which one device takes in, and sends, all messages of a visit."""

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
    fresh, again, out = (PassedBuilder(cuts) for _ in range(3))
    hop = PrefixSums(np.zeros(cuts), np.zeros(cuts))
    for tensor in chain.tensors:
        readers = np.array(tensor.consumers)
        for lo in range(tensor.producer + 1, int(readers[-1]) + 1):
            reader = int(readers[np.searchsorted(readers, lo)])
            fresh.add(tensor, np.s_[lo, reader + 1 :])
            if lo == tensor.producer + 1:
                again.add(tensor, np.s_[lo, reader + 1 :])
                if reader == lo:
                    hop.fixed[lo] += tensor.bytes.fixed
                    hop.per_row[lo] += 0.0 if tensor.whole else tensor.bytes.per_sample
        for reader in tensor.consumers:
            out.add(tensor, np.s_[: tensor.producer + 1, reader])
    return Traffic(fresh.passed(), again.passed(), out.passed(), hop)


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
    """The times of visits on ``replicas`` that see ``micro_batches`` micro-batches.

    Gradients are summed over ``sums_over`` devices.
    """
    chain, traffic, limits = setting.chain, setting.traffic, setting.limits
    few, most, rows = replicas.fewest, replicas.most, setting.rows
    costs = chain.work.of_runs()
    parameter_bytes = runs(chain.parameter_bytes)
    step_s = setting.problem.profile.step_s_per_byte * parameter_bytes
    work = micro_batches * (few * costs.fixed + rows * costs.per_row) + few * step_s
    speed = setting.speed_sums[most]

    def links(into: Passed) -> Links:
        out, latency_s = traffic.out, limits.latency_s
        took = few * into.down.fixed + out.up.fixed
        took = took + rows * (into.down.per_row + out.up.per_row)
        sent = few * into.up.fixed + out.down.fixed
        sent = sent + rows * (into.up.per_row + out.down.per_row)
        took_s = took / limits.receive_rates[most] + latency_s * into.down_count
        sent_s = sent / limits.send_rates[most] + latency_s * into.up_count
        return Links(micro_batches * took_s, micro_batches * sent_s)

    return VisitTimes(
        work,
        work / speed if speed > 0 else np.full_like(work, np.inf),
        links(traffic.fresh),
        links(traffic.again),
        reduce_s(limits, sums_over, parameter_bytes),
        recompute_s(setting, replicas, micro_batches),
    )


def recompute_s(setting: Setting, replicas: Replicas, micro_batches: float) -> Floats:
    """What every run must compute again, on all devices, in seconds of one of speed 1.

    After the last forward of a micro-batch in a visit its device keeps all that the visit saves of
    it, or computes it again; the mean device has ``b / r`` rows. Infinite where the parameters and
    one layer's rows do not fit on the largest device, or where nothing may be computed again. With
    ``g`` the bytes a second of forward of all layers, a layer saves at most ``g`` times its forward
    and a rest; so a second of recompute frees ``g``, beside the rest of all layers.
    """
    chain, problem, rows = setting.chain, setting.problem, setting.rows / replicas.most
    copies = 2 + problem.optimizer_bytes_per_parameter_byte
    largest = max(device.memory_bytes for device in problem.cluster.devices) * (1 + MEMORY_ROUNDING)
    room = largest - copies * runs(chain.parameter_bytes) - runs(chain.buffer_bytes)
    saved = np.diff(chain.saved.fixed + rows * chain.saved.per_row)
    over = runs(sums_before(saved)) - room
    if problem.recompute == "off":
        return np.where(over > 0, np.inf, 0.0)
    forward = np.diff(chain.forward.fixed + rows * chain.forward.per_row)
    rate = saved.sum() / forward.sum() if forward.sum() > 0 else 0.0
    # A layer's rest is no more than that of its fixed part and that of its rows.
    for bytes_of, forward_of, count in (
        (chain.saved.fixed, chain.forward.fixed, 1.0),
        (chain.saved.per_row, chain.forward.per_row, rows),
    ):
        rest = np.maximum(0.0, np.diff(bytes_of) - rate * np.diff(forward_of))
        over -= count * runs(sums_before(rest))
    each = replicas.fewest * micro_batches / rate if rate > LEAST_RATE else 0.0
    again = np.maximum(over, 0.0) * each
    return np.where(most_of_runs(saved) > room, np.inf, again)


def most_of_runs(values: Floats) -> Floats:
    """The largest value of the layers of every run."""
    most = np.zeros((len(values) + 1,) * 2)
    for lo in range(len(values)):
        most[lo, lo + 1 :] = np.maximum.accumulate(values[lo:])
    return most


def sums_before(values: Floats) -> Floats:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate(([0.0], np.cumsum(values)))


def reduce_s(limits: LinkLimits, devices: int, parameter_bytes: Floats) -> Floats:
    """The least that an all-reduce of gradients in buckets takes, however they are shared out."""
    ways = limits.ways(devices)
    if not ways:
        return np.zeros_like(parameter_bytes)
    latency_s = min(way.latency_s for way in ways)
    s_per_byte = min(way.s_per_byte for way in ways)
    return np.ceil(parameter_bytes / BUCKET_BYTES) * latency_s + s_per_byte * parameter_bytes


def runs(sums: Floats) -> Floats:
    """Sums at the cuts as sums of every run."""
    return sums[None, :] - sums[:, None]


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
