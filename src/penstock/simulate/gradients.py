"""Which gradients are all-reduced among which devices, in which buckets, and when."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import BUCKET_BYTES, AllReduceCost, all_reduce_costs
from penstock.core.native import TieTimes
from penstock.costs.layer_sums import LayerSums
from penstock.profile.model_profile import SharedParameter


@dataclass(frozen=True, slots=True)
class Ports:
    """The hosts whose outgoing and incoming ports an all-reduce or a message uses."""

    outgoing: tuple[int, ...] = ()
    incoming: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GradientShare:
    """Gradients that are complete with one segment of the last backward, in equal buckets.

    ``seconds`` and ``bytes`` are those of one bucket.
    """

    segment: int
    buckets: int
    seconds: float
    bytes: float


@dataclass(frozen=True)
class TiedGroup:
    """Parameters that several instances hold; complete with the last segment of each.

    These are parameters tied across stages, and all parameters of a mirrored stage.
    """

    stages: tuple[int, ...]
    shares: tuple[GradientShare, ...]
    ports: Ports

    @cached_property
    def times(self) -> TieTimes:
        """The same for the core's engine."""
        seconds = seconds_of_buckets(self.shares)
        return TieTimes(self.stages, seconds, self.ports.outgoing, self.ports.incoming)


def seconds_of_buckets(shares: Sequence[GradientShare]) -> list[float]:
    """The seconds of every bucket, one after the other."""
    return [share.seconds for share in shares for _ in range(share.buckets)]


def gradient_cuts(layers: range, sums: LayerSums) -> Iterator[tuple[int, int]]:
    """(layer, bytes) of every bucket: going backwards, the layer at which the bucket is full.

    >>> from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
    >>> from penstock.costs.layer_sums import LayerSums
    >>> sizes = (0, 9 << 20, 20 << 20, 10 << 20)
    >>> model = [LayerCost("", Affine(), Affine(), Affine(), size) for size in sizes]
    >>> list(gradient_cuts(range(4), LayerSums(ModelProfile("m", tuple(model)))))
    [(2, 31457280), (1, 9437184)]
    """
    sizes, stop = sums.own_parameter_bytes, layers.stop
    while (layer := sizes.highest(stop, BUCKET_BYTES)) >= layers.start:
        yield layer, sizes.of(range(layer, stop))
        stop = layer
    if rest_bytes := sizes.of(range(layers.start, stop)):
        yield sizes.lowest(layers.start), rest_bytes


def share_of(costs: Sequence[AllReduceCost], segment: int, size_bytes: float) -> GradientShare:
    """Gradients in equal buckets of at most `BUCKET_BYTES`, with the fastest all-reduce."""
    count = ceil(size_bytes / BUCKET_BYTES)
    bucket_bytes = size_bytes / count
    seconds = min(cost.of(bucket_bytes) for cost in costs)
    return GradientShare(segment, count, seconds, bucket_bytes)


def shares_of_stage(
    layers: range, devices: Sequence[int], sums: LayerSums, cluster: Cluster
) -> tuple[tuple[int, ...], tuple[GradientShare, ...]]:
    """The gradients that the replicas of a stage reduce, from the last layer to the first.

    Also returns the first layer of each segment of the last backward. Parameters tied within the
    stage are complete only at the end of the backward, since the first layer may use them.
    """
    if len(devices) == 1:
        return (layers.start,), ()
    cuts = list(gradient_cuts(layers, sums))
    stops = [layer for layer, _ in cuts]
    sizes = [(segment, size_bytes) for segment, (_, size_bytes) in enumerate(cuts)]
    if layers.start not in stops:
        stops.append(layers.start)
    sizes += [
        (len(stops) - 1, shared.bytes)
        for shared in sums.profile.shared
        if shared.bytes and shared.layers and all(layer in layers for layer in shared.layers)
    ]
    costs = all_reduce_costs(cluster, devices)
    return tuple(stops), tuple(share_of(costs, *size) for size in sizes)


def bytes_of_own(layers: range, sums: LayerSums) -> int:
    """Bytes of the parameters that only ``layers`` use."""
    return sums.own_parameter_bytes.of(layers) + sum(
        shared.bytes
        for shared in sums.profile.shared
        if shared.layers and all(layer in layers for layer in shared.layers)
    )


def tied_parameters(
    stage_of_layer: Sequence[int], shared: Sequence[SharedParameter]
) -> dict[tuple[int, ...], list[int]]:
    """Bytes of the parameters that several stages share, by these stages."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for parameter in shared:
        stages = tuple(sorted({stage_of_layer[layer] for layer in parameter.layers}))
        if len(stages) > 1 and parameter.bytes:
            found[stages].append(parameter.bytes)
    return dict(sorted(found.items()))


def group_ports(cluster: Cluster, devices: Sequence[int]) -> Ports:
    """The ports that an all-reduce uses: those of hosts where some pair has no link of its own."""
    members = Counter(cluster.host_index[device] for device in devices)
    inside = set(devices)
    linked = Counter(
        (cluster.host_index[i], cluster.host_index[j])
        for i, j in cluster.special_links
        if i in inside and j in inside
    )
    if not linked:
        hosts = tuple(sorted(members)) if len(members) > 1 else ()
        return Ports(hosts, hosts)
    passed = [
        (a, b)
        for a in members
        for b in members
        if a != b and linked[a, b] < members[a] * members[b]
    ]
    return Ports(tuple(sorted({a for a, _ in passed})), tuple(sorted({b for _, b in passed})))
