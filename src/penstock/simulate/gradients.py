"""Which gradients are all-reduced among whom, in which buckets, available when."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_s
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.layer_sums import AffineSums
from penstock.simulate.transfers import engines_and_ports
from penstock.simulate.workload import Bucket, Reduction, Segment

__all__ = ["BUCKET_BYTES", "GradientCut", "gradient_cuts", "reductions_of", "segments_of"]

BUCKET_BYTES = 25 << 20
"""Gradients are reduced in buckets of about this size, as in DistributedDataParallel."""


@dataclass(frozen=True, slots=True)
class GradientCut:
    """Once the last backward has reached ``layer``, the buckets (numbered) are complete."""

    layer: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes that the devices at ``members`` reduce after the backward has reached ``layer``."""

    members: tuple[int, ...]
    stage: int
    layer: int
    bytes: float


def reductions_of(
    plan: Plan, profile: ModelProfile, cluster: Cluster
) -> tuple[tuple[Reduction, ...], tuple[tuple[GradientCut, ...], ...]]:
    """The reductions of a plan, and for each device position when their buckets are complete.

    Replicas of a stage sum their gradients; a tied parameter is summed over all devices of all
    stages that hold it.
    """
    shares = [*replica_shares(plan, profile), *tied_shares(plan, profile)]
    members = sorted({share.members for share in shares})
    reductions: list[Reduction] = []
    cuts: list[list[GradientCut]] = [[] for _ in plan.devices]
    first_bucket = 0
    for group in members:
        buckets: list[Bucket] = []
        for share in (share for share in shares if share.members == group):
            new = buckets_of(plan, cluster, share)
            start = first_bucket + len(buckets)
            for position in group:
                cuts[position].append(
                    GradientCut(share.layer, tuple(range(start, start + len(new))))
                )
            buckets += new
        first_bucket += len(buckets)
        resources = engines_and_ports(cluster, plan.devices, group, group)
        reductions.append(Reduction(group, tuple(buckets), resources))
    return tuple(reductions), tuple(tuple(device_cuts) for device_cuts in cuts)


def buckets_of(plan: Plan, cluster: Cluster, share: Share) -> list[Bucket]:
    """A share in equal buckets of at most `BUCKET_BYTES`."""
    count = ceil(share.bytes / BUCKET_BYTES)
    size_bytes = share.bytes / count
    devices = [plan.devices[position] for position in share.members]
    seconds = all_reduce_s(cluster, devices, size_bytes)
    return [Bucket(share.stage, seconds, size_bytes)] * count


def replica_shares(plan: Plan, profile: ModelProfile) -> list[Share]:
    """The gradients of every replicated stage, from its last layer to its first."""
    shares: list[Share] = []
    start = 0
    for index, stage in enumerate(plan.stages):
        members = tuple(range(start, start + stage.replicas))
        start += stage.replicas
        if stage.replicas > 1:
            sizes = {layer: profile.layers[layer].parameter_bytes for layer in stage.layers}
            for cut in gradient_cuts(stage, sizes):
                shares.append(Share(members, index, *cut))
    return shares


def gradient_cuts(stage: Stage, sizes: dict[int, int]) -> list[tuple[int, int]]:
    """(layer, bytes) wherever, going backwards, another bucket of gradients is full.

    >>> gradient_cuts(Stage(range(4), (0, 1), (1, 1)), {0: 0, 1: 9 << 20, 2: 20 << 20, 3: 10 << 20})
    [(2, 31457280), (1, 9437184)]
    """
    cuts: list[tuple[int, int]] = []
    waiting_bytes = 0
    lowest = stage.layers.start
    for layer in reversed(stage.layers):
        if sizes[layer]:
            waiting_bytes += sizes[layer]
            lowest = layer
        if waiting_bytes >= BUCKET_BYTES:
            cuts.append((layer, waiting_bytes))
            waiting_bytes = 0
    if waiting_bytes:
        cuts.append((lowest, waiting_bytes))
    return cuts


def tied_shares(plan: Plan, profile: ModelProfile) -> list[Share]:
    """The gradients of each shared parameter, over all devices of the stages that use it."""
    shares: list[Share] = []
    starts = [0]
    for stage in plan.stages:
        starts.append(starts[-1] + stage.replicas)
    for shared in profile.shared:
        users = [
            s
            for s, stage in enumerate(plan.stages)
            if any(layer in stage.layers for layer in shared.layers)
        ]
        members = tuple(p for s in users for p in range(starts[s], starts[s + 1]))
        if len(members) > 1 and shared.bytes:
            # Complete only when the whole backward is: the stage may use it in its first layer.
            shares.append(Share(members, users[0], -1, float(shared.bytes)))
    return shares


def segments_of(
    layers: range, cuts: Sequence[GradientCut], sums: AffineSums, rows: int, speed: float
) -> tuple[Segment, ...]:
    """The last backward of one device, cut where gradients are complete."""
    segments: list[Segment] = []
    upper = layers.stop
    by_layer: dict[int, list[int]] = {}
    for cut in cuts:
        by_layer.setdefault(max(cut.layer, layers.start), []).extend(cut.buckets)
    for layer in sorted({*by_layer, layers.start}, reverse=True):
        seconds = sums.of(range(layer, upper), rows) / speed
        segments.append(Segment(seconds, tuple(by_layer.get(layer, ()))))
        upper = layer
    return tuple(segments)
