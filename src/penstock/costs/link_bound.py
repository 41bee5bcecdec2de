"""Stay on one host, or pay: a bound from the links between hosts, for every order that flushes.

*Core.* Take a path of layers, each of which sends the next one a tensor of at least ``m`` bytes a
row, its gradient included. Only their work counts here, ``q`` seconds for a row in layer ``l``, and
their parameters. Let an iteration of ``B`` rows take ``T`` seconds. Let the links between a host
and all others carry ``passed`` bytes a second, both ways together.

*Rows.* Say a host computes some layers of the core for a row, but not all. Then the path enters or
leaves the host, so ``m`` bytes pass its links. If the host has neither the first layer nor the last
one for this row, the path does both, with two tensors, and ``2 m`` bytes pass.

*Hosts that hold the whole core.* If they are ``k > 1``, every gradient of the core is summed over
``k`` hosts or more. That takes at least ``2 (k - 1) / k`` times its bytes at the rate of the
slowest of them, alone or between leaders of hosts. It comes after all forwards of the iteration.

*Hosts that hold some layer alone* compute it for all rows. Where one of them holds not the whole
core, no host does. Let ``e`` of its rows be such that it has an end of the core. Then
``(2 B - e) m <= passed T`` and ``e <= B``. A row has two ends. So all ``e`` together are at most
``2 B``.

*All other hosts* share each of their layers with another host. To sum the gradients of ``z`` bytes
of parameters takes ``z / rate`` seconds of their links, after all forwards. In the rest they pass
``m`` bytes for each row. The layers that give most work for ``z`` bytes are those with most work a
byte, the last of them in part. No layer counts whose own sum takes too long.

*The bound.* Let those hosts hold the whole core, or a layer alone, that gain most by it. If for no
``k`` all hosts together do the work of the core, ``T`` is too short. The bound is the least ``T``
that is not, for the core that shows most. ∎

Messages, sums and work may all overlap. Stages play no part: devices may hold any number of them,
in either direction. But devices keep the parameters of their layers whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from penstock.cluster.cluster import Cluster, Host
from penstock.cluster.link_matrices import link_matrices
from penstock.core.native import held_bytes
from penstock.costs.run_tables import Floats
from penstock.plan.plan import SHARDINGS
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, ModelProfile

ROUNDING, PRECISION = 1e-9, 1e-4
"""Any time counts as a little longer. The bound is found from below, up to such a share."""

FASTEST = 1e30
"""Bytes a second of links that take no time."""


@dataclass(frozen=True)
class Core:
    """A path of layers, each of which sends the next at least ``row_bytes`` for every row."""

    layers: tuple[int, ...]
    row_bytes: float


@dataclass(frozen=True)
class Hosts:
    """Speed, memory and links to other hosts of every host.

    ``rates`` is the best of these links. ``passed`` are the bytes that all of them carry in a
    second, both ways together; a sum of gradients keeps at least ``blocked`` of them.
    """

    speeds: Floats
    memory_bytes: Floats
    rates: Floats
    passed: Floats
    blocked: Floats


def hosts_of(cluster: Cluster) -> Hosts:
    """The hosts of ``cluster``: one message at a time on a port, or on each device's own links."""
    index = np.array(cluster.host_index)
    rates = np.minimum(link_matrices(cluster).bytes_per_s, FASTEST)
    rates[index[:, None] == index[None, :]] = 0.0
    sent, received = rates.max(axis=1), rates.max(axis=0)
    best, passed, blocked = np.zeros((3, len(cluster.hosts)))
    for number, host in enumerate(cluster.hosts):
        out, into = sent[index == number], received[index == number]
        each = np.maximum(out, into) if host.half_duplex else out + into
        best[number] = max(out.max(), into.max())
        passed[number] = each.sum() if cluster.links else each.max()
        blocked[number] = each.min() if cluster.links else each.max()
    return Hosts(
        np.array([sum(host_speeds(host)) for host in cluster.hosts]),
        np.array([sum(device.memory_bytes for device in host.devices) for host in cluster.hosts]),
        best,
        passed,
        blocked,
    )


@dataclass(frozen=True)
class CoreWork:
    """A core on some hosts: the seconds of a row in each layer, and the bytes of its parameters.

    Layers are in the order of falling work a byte. ``forwards_s`` is the least time of all forwards
    of the model. ``whole_bytes`` is the memory of a host that holds the whole core.
    """

    hosts: Hosts
    rows: int
    row_bytes: float
    layer_s: Floats
    layer_bytes: Floats
    whole_bytes: float
    forwards_s: float

    def is_enough(self, time_s: float) -> bool:
        """Return whether all hosts together can do the core's work, as far as argued."""
        time_s *= 1 + ROUNDING
        hosts, most_s = self.hosts, self.hosts.speeds * time_s
        summing_s = max(0.0, time_s - self.forwards_s) * hosts.passed / hosts.blocked
        shared_s = np.minimum(self.shared_s(time_s, summing_s * hosts.rates), most_s)
        missing_s = self.rows * self.layer_s.sum() - shared_s.sum()
        gains_s = most_s - shared_s
        if missing_s <= largest(gains_s, self.alone(time_s)):
            return True
        k = np.arange(2, len(most_s) + 1)
        sums_s = 2 * (k - 1) / k * self.layer_bytes.sum() / np.sort(hosts.rates)[-2::-1]
        fits = hosts.memory_bytes * (1 + ROUNDING) >= self.whole_bytes
        whole = 1 + int((sums_s <= summing_s.max()).sum())
        return missing_s <= largest(gains_s[fits], whole)

    def alone(self, time_s: float) -> int:
        """The number of hosts that may hold some layer alone, where none holds the whole core."""
        ends = np.maximum(0.0, 2 * self.rows - self.hosts.passed * time_s / self.row_bytes)
        return int((np.cumsum(np.sort(ends[ends <= self.rows])) <= 2 * self.rows).sum())

    def shared_s(self, time_s: float, most_bytes: Floats) -> Floats:
        """The most work of each host that shares all its layers, of at most ``most_bytes``.

        A host that has all layers before ``start`` and a part of the next one, ``z`` bytes in all,
        computes ``kept + rate (z - start)`` seconds for a row, and ``(able - z) / each`` rows. The
        product is largest where its derivative is zero, but for the limits on ``z`` and the rows.
        """
        hosts, (start, kept, rate) = self.hosts, self.layers_within(float(most_bytes.max()))
        able = (hosts.passed * time_s * hosts.rates / hosts.blocked)[:, None]
        each = (hosts.rates * self.row_bytes / hosts.blocked)[:, None]
        z = np.maximum((able + start[:-1] - kept / rate) / 2, able - each * self.rows)
        end = np.maximum(start[:-1], np.minimum(start[1:], most_bytes[:, None]))
        z = np.clip(z, start[:-1], end)
        rows = np.clip((able - z) / each, 0.0, self.rows)
        return (rows * (kept + rate * (z - start[:-1]))).max(axis=1)

    def layers_within(self, most_bytes: float) -> tuple[Floats, Floats, Floats]:
        """The start of each layer of at most ``most_bytes``, the work before, and its work a byte.

        Layers without parameters come before all others, and a layer of nothing comes last.
        """
        able = (self.layer_bytes > 0) & (self.layer_s > 0)
        able &= self.layer_bytes <= most_bytes * (1 + ROUNDING)
        start = np.array([0.0, *np.cumsum(self.layer_bytes[able])])
        kept = np.cumsum([self.layer_s[self.layer_bytes == 0].sum(), *self.layer_s[able]])
        rate = self.layer_s[able] / self.layer_bytes[able]
        return np.append(start, start[-1]), kept, np.append(rate, 1.0)


def largest(values: Floats, count: int) -> float:
    """The sum of the largest ones."""
    return float(np.sort(values)[::-1][:count].sum())


def link_bound(problem: PlanningProblem, size: int, floor_s: float) -> tuple[float, Core | None]:
    """Seconds that no plan with micro-batches of ``size`` beats, and the core that shows it.

    ``floor_s`` is a bound known before; no core is returned that shows no more.
    """
    found: tuple[float, Core | None] = floor_s, None
    if len(problem.cluster.hosts) == 1:
        return found
    hosts, layers = hosts_of(problem.cluster), problem.profile.layers
    kinds = [SHARDINGS.index(what) for what in problem.shardings if what != "parameters"]
    state = problem.optimizer_bytes_per_parameter_byte

    def least_s(costs: list[Affine]) -> Floats:
        return np.array([least_per_sample(cost, size) for cost in costs])

    work_s = least_s([layer.forward_s + layer.backward_s for layer in layers])
    forwards_s = problem.global_batch * least_s([layer.forward_s for layer in layers]).sum()
    for core in cores_of(problem.profile, size, work_s.tolist()):
        layer_bytes = np.array([float(layers[i].parameter_bytes) for i in core.layers])
        layer_s = work_s[list(core.layers)]
        order = np.argsort(-layer_s / np.maximum(layer_bytes, 1.0), kind="stable")
        work = CoreWork(
            hosts,
            problem.global_batch,
            core.row_bytes,
            layer_s[order],
            layer_bytes[order],
            min(held_bytes(what, inf, float(layer_bytes.sum()), 0.0, 2.0, state) for what in kinds),
            float(forwards_s / hosts.speeds.sum()),
        )
        seconds = least_time(work, found[0])
        if seconds > found[0]:
            found = seconds, core
    return found


def least_time(work: CoreWork, floor_s: float) -> float:
    """The least time of at least ``floor_s`` that may be enough, rounded down."""
    too_short_s = enough_s = floor_s
    while not work.is_enough(enough_s):
        too_short_s, enough_s = enough_s, 2 * enough_s
    while enough_s > too_short_s * (1 + PRECISION):
        middle_s = (too_short_s + enough_s) / 2
        if work.is_enough(middle_s):
            enough_s = middle_s
        else:
            too_short_s = middle_s
    return too_short_s


def cores_of(profile: ModelProfile, most_rows: int, work_s: Sequence[float]) -> Iterator[Core]:
    """The paths of most work whose tensors all have at least a size, for each size of tensors."""
    tensors = sent_tensors(profile, most_rows)
    for least in sorted({size for size, _, _ in tensors}):
        path_s, before = list(work_s), [-1] * len(work_s)
        for size, producer, consumer in tensors:
            seconds = path_s[producer] + work_s[consumer]
            if size >= least and seconds > path_s[consumer]:
                path_s[consumer], before[consumer] = seconds, producer
        layers = [max(range(len(path_s)), key=path_s.__getitem__)]
        while before[layers[-1]] >= 0:
            layers.append(before[layers[-1]])
        if len(layers) > 1:
            yield Core(tuple(reversed(layers)), least)


def sent_tensors(profile: ModelProfile, most_rows: int) -> list[tuple[float, int, int]]:
    """The least bytes of a row, its gradient included, producer and consumer of tensors with rows.

    Sorted by consumers. A device gets a tensor once, whichever layers of its stages read it, so the
    least of all its readers counts.
    """
    least: dict[tuple[int, str], float] = {}
    for edge in profile.edges:
        floors = [floor_of(size, most_rows) for size in (edge.bytes, edge.gradient_bytes)]
        size = sum(floor.per_sample + floor.fixed / most_rows for floor in floors)
        size = 0.0 if edge.goes_whole else size
        least[edge.made] = min(size, least.get(edge.made, inf))
    edges = sorted(profile.edges, key=lambda edge: edge.consumer)
    found = [(least[edge.made], edge.producer, edge.consumer) for edge in edges]
    return [one for one in found if one[0] > 0]


def floor_of(cost: Affine, most_rows: int) -> Affine:
    """A cost without negative terms that for 1 to ``most_rows`` rows is not above ``cost``.

    Fitted costs may have a negative term: ``-1 + 3 n`` is at least ``2 n``, and ``9 - n`` is at
    least its value for the most rows.

    >>> floor_of(Affine(-1.0, 3.0), 8)
    Affine(fixed=0.0, per_sample=2.0)
    """
    if cost.fixed < 0:
        return Affine(0.0, max(0.0, cost.at(1)))
    if cost.per_sample < 0:
        return Affine(max(0.0, cost.at(most_rows)), 0.0)
    return cost


def least_per_sample(cost: Affine, most_samples: int) -> float:
    """The least cost of a sample in slices of 1 to ``most_samples``; an affine one is extreme
    there."""
    return max(0.0, min(cost.at(1), cost.at(most_samples) / most_samples))


def host_speeds(host: Host) -> list[float]:
    """Speeds of the devices of a host that can compute at full speed at once, fastest first."""
    speeds = sorted((device.speed for device in host.devices), reverse=True)
    return speeds[: host.full_speed_devices or len(speeds)]
