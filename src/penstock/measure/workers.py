"""One profile and the speeds of devices, from workers that measured at the same time.

Workers on one machine contend for its memory and caches while they train. So they are measured
under the same contention: each times the same model at the same time as the others.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import median, median_low

from penstock.cluster.cluster import Cluster, Device, with_devices
from penstock.errors import BadInput
from penstock.profile.model_profile import (
    Affine,
    GroupFactor,
    LayerCost,
    ModelProfile,
    TensorParallelCosts,
)

CLEARLY_LESS = 0.75
"""Of two equals one clearly differs if it has less than this share of the other."""

SPREAD = 1.5
"""Layers that differ by more than this on a device, relative to the usual one, are reported."""


def profile_and_speeds(
    profiles: Sequence[ModelProfile], cluster: Cluster
) -> tuple[ModelProfile, Cluster]:
    """The profile of the usual device, from those of all ranks; and how fast the others are.

    The usual device is of the most common kind, and in the middle of its kind. The profile is the
    median over the ranks that compute like it. CPU ranks of one host share its cores, so they have
    one speed, except ranks that clearly wait longer for a core than the usual one, because of a
    quota, or of other programs on their core or host.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for rank, profile in enumerate(profiles):
        on_cpu = profile.device == "cpu"
        groups[("host", cluster.host_index[rank]) if on_cpu else rank].append(rank)
    together = {
        rank: median_profile([profiles[one] for one in group])
        for group in groups.values()
        for rank in group
    }
    kind = usual_kind(cluster)
    ranks = [rank for rank, device in enumerate(cluster.devices) if device.kind == kind]
    by_seconds = sorted(ranks, key=lambda rank: together[rank].whole_s)
    usual = together[by_seconds[(len(ranks) - 1) // 2]]
    speeds = [layer_speeds(usual, together[rank]) for rank in range(len(profiles))]
    usual_load = median_low(profiles[rank].other_load for rank in ranks)
    found = with_speeds(
        cluster,
        [
            middle(of_layers, 0.5) * (1 + usual_load) / (1 + own.other_load)
            for of_layers, own in zip(speeds, profiles, strict=True)
        ],
    )
    equal = [rank for rank in ranks if found.devices[rank].speed == 1.0]
    merged = median_profile([profiles[rank] for rank in equal])
    others: dict[str, str] = {}
    for rank, device in enumerate(found.devices):
        slowest, fastest = (middle(speeds[rank], share) for share in (0.1, 0.9))
        if device.kind != kind and fastest > SPREAD * slowest:
            others[device.kind] = (
                f"layers run on {device.kind} at {slowest:.2g} to {fastest:.2g} times the speed of "
                f"{kind}; all are planned at {device.speed:g}"
            )
    return replace(merged, notes=(*merged.notes, *others.values())), found


def usual_kind(cluster: Cluster) -> str:
    """The kind of most devices; of several such kinds, that of the first device."""
    return Counter(device.kind for device in cluster.devices).most_common(1)[0][0]


def with_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """The cluster with these speeds of its devices, relative to the usual one.

    Devices of the usual kind have speed 1 unless theirs is clearly another.
    """
    kind, own = usual_kind(cluster), iter(speeds)

    def at(device: Device, speed: float) -> Device:
        equal = device.kind == kind and CLEARLY_LESS < speed < 1 / CLEARLY_LESS
        return replace(device, speed=1.0 if equal else float(f"{speed:.3g}"))

    return with_devices(cluster, lambda device: at(device, next(own)))


def layer_speeds(usual: ModelProfile, own: ModelProfile) -> list[tuple[float, float]]:
    """Speed of each layer relative to the usual one, and its usual seconds; the slowest first."""
    found: list[tuple[float, float]] = []
    for one, other in zip(usual.layers, own.layers, strict=True):
        usual_s, own_s = (layer.work_s.at(usual.batch_size) for layer in (one, other))
        if usual_s and own_s:
            found.append((usual_s / own_s, usual_s))
    return sorted(found)


def middle(speeds: Sequence[tuple[float, float]], share: float) -> float:
    """The speed below which this share of the seconds is spent; 1 if no layer takes time.

    Layers count by their seconds: many small ones may take as long on every device, since only the
    starts of their kernels do.
    """
    left = share * sum(seconds for _, seconds in speeds)
    for speed, seconds in speeds:
        left -= seconds
        if left <= 0:
            return speed
    return 1.0


def median_profile(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """The median over workers of every layer's times; bytes are the same for all."""
    names = {tuple(layer.name for layer in profile.layers) for profile in profiles}
    if len(names) != 1:
        raise BadInput(
            f"{len(profiles)} profiles of {len(names)} different models have no median; measure "
            f"the same model in every worker"
        )
    first = profiles[0]
    lengths = zip(*(profile.by_length for profile in profiles), strict=True)
    return replace(
        first,
        layers=median_costs([profile.layers for profile in profiles]),
        by_length=tuple(
            replace(every[0], layers=median_costs([costs.layers for costs in every]))
            for every in lengths
        ),
        step_s_per_byte=median(profile.step_s_per_byte for profile in profiles),
        host_step_s_per_byte=median(profile.host_step_s_per_byte for profile in profiles),
        stage_forward_s=median(profile.stage_forward_s for profile in profiles),
        stage_backward_s=median(profile.stage_backward_s for profile in profiles),
        statistics_s=median(profile.statistics_s for profile in profiles),
        other_load=median_low(profile.other_load for profile in profiles),
        variation=median(profile.variation for profile in profiles),
        notes=max((profile.notes for profile in profiles), key=len),
        source=f"{first.source}, {len(profiles)} workers at once",
        tensor_parallel=with_median_factors([profile.tensor_parallel for profile in profiles]),
    )


def with_median_factors(
    workers: Sequence[TensorParallelCosts | None],
) -> TensorParallelCosts | None:
    """Costs of tensor groups, with the median over workers of each measured factor."""
    known = [costs for costs in workers if costs is not None]
    if not known:
        return None
    factors = tuple(
        GroupFactor(ranks, median(costs.factor(ranks) for costs in known))
        for ranks, _ in known[0].factors
    )
    return replace(known[0], factors=factors)


def median_costs(workers: Sequence[Sequence[LayerCost]]) -> tuple[LayerCost, ...]:
    """The median times of every layer over workers."""
    return tuple(own[0].with_seconds_of(own, median_affine) for own in zip(*workers, strict=True))


def median_affine(costs: Sequence[Affine]) -> Affine:
    """The median of each term."""
    return Affine(median(c.fixed for c in costs), median(c.per_sample for c in costs))
