"""Watches whether ranks and links are as fast as planned, and plans again with the times found."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.cluster.cluster import Cluster, Link
from penstock.jobs.job import Job
from penstock.jobs.plan_job import new_plan, predict
from penstock.jobs.train_request import TrainRequest
from penstock.plan.plan import Plan
from penstock.planning.answers import TimeLimit
from penstock.profile.model_profile import LayerCost, ModelProfile
from penstock.timeline.drift import (
    Compared,
    Drift,
    common_factor,
    compared,
    own_factors,
    steady_drifts,
)
from penstock.timeline.metrics import iteration_s
from penstock.timeline.timeline import Timeline
from penstock.words import percent_text, seconds_text

__all__ = ["LEAST_GAIN", "STEADY_SAMPLES", "DriftWatch", "Replanned", "as_found", "replan"]

STEADY_SAMPLES = 4
"""In so many measured iterations, one after another, a part must be slow."""


@dataclass
class DriftWatch:
    """Compares measured iterations of ``batches`` batches with the planned one."""

    planned: Timeline
    batches: int
    samples: deque[Compared] = field(
        default_factory=partial(deque[Compared], maxlen=STEADY_SAMPLES)
    )

    def add(self, measured: Timeline) -> dict[str, float]:
        """Add an iteration; returns how many times as long as planned each part took."""
        times = compared(self.planned, measured, self.batches)
        self.samples.append(times)
        factors = {str(part): factor for part, factor in own_factors(times).items()}
        return {"all_ranks": common_factor(times)} | factors

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """What has been slow in all of the latest samples."""
        if len(self.samples) < STEADY_SAMPLES:
            return ()
        return steady_drifts(self.samples, iteration_s(self.planned))


LIMIT = TimeLimit(10.0, time.perf_counter)
"""For a plan that nobody has asked for, or that the ranks wait for."""

LEAST_GAIN = 0.05
"""Share of a step's time that a new plan must save to be worth a change."""

Costs = tuple[ModelProfile, Cluster]


@dataclass(frozen=True, slots=True)
class Replanned:
    """A plan made with the times of a run, and seconds of a step under the old plan and under it.

    Both are predicted, from the same times; ``measured_s`` is what a step took.
    """

    plan: Plan
    now_s: float
    then_s: float
    measured_s: float

    @property
    def gain(self) -> float:
        """The share of the step's time that would be saved."""
        return 1 - self.then_s / self.now_s

    @property
    def is_worth_it(self) -> bool:
        """Whether it would save more than `LEAST_GAIN`, and more than predictions are wrong by."""
        error = abs(self.now_s / self.measured_s - 1)
        return self.gain >= max(LEAST_GAIN, error)

    def __str__(self) -> str:
        return (
            f"planning again with these times would take a step from {seconds_text(self.now_s)} to "
            f"{seconds_text(self.then_s)} (by prediction, {percent_text(self.gain)} less)"
        )


def replan(
    job: Job,
    request: TrainRequest,
    plan: Plan,
    costs: Costs,
    drifts: Sequence[Drift],
    measured_s: float,
) -> tuple[Replanned, Costs]:
    """What planning again would bring, and profile and cluster with the times found."""
    profile, cluster = as_found(plan, *costs, drifts)
    found = new_plan(job, request, profile, cluster, LIMIT)
    now_s, then_s = (predict(job, each, profile, cluster).iteration_s for each in (plan, found))
    return Replanned(found, now_s, then_s, measured_s), (profile, cluster)


def as_found(plan: Plan, profile: ModelProfile, cluster: Cluster, drifts: Sequence[Drift]) -> Costs:
    """Profile and cluster with the times of a run that drifted.

    All layers take longer by the common factor. What all replicas of a stage have in common beyond
    that is the cost of its layers. The rest is the speed of a device.
    """
    stages = {drift.part[1:]: drift.factor for drift in drifts if drift.part.kind == "stage"}
    layers = [slower(layer, drifts[0].common if drifts else 1.0) for layer in profile.layers]
    speeds = [device.speed for device in cluster.devices]
    for number, stage in enumerate(plan.stages):
        ranks = [rank for device in plan.devices_of(number) for rank in plan.ranks_of(device)]
        factors = {rank: stages.get((number, rank), 1.0) for rank in ranks}
        common = min(factors.values())
        for layer in stage.layers:
            layers[layer] = slower(layers[layer], common)
        for rank, factor in factors.items():
            speeds[rank] = min(speeds[rank], cluster.devices[rank].speed * common / factor)
    links = dict(cluster.special_links)
    for drift in drifts:
        kind, source, target = drift.part
        if kind == "link":
            rate = cluster.bandwidth(source, target) / drift.factor
            links[source, target] = Link(source, target, rate, cluster.latency(source, target))
    own = iter(speeds)
    hosts = tuple(
        replace(host, devices=tuple(replace(d, speed=next(own)) for d in host.devices))
        for host in cluster.hosts
    )
    found = replace(profile, layers=tuple(layers))
    return found, replace(cluster, hosts=hosts, links=tuple(links.values()))


def slower(layer: LayerCost, factor: float) -> LayerCost:
    """A layer whose times are ``factor`` times as long."""
    return replace(
        layer,
        forward_s=layer.forward_s.scaled(factor),
        backward_input_s=layer.backward_input_s.scaled(factor),
        backward_weight_s=layer.backward_weight_s.scaled(factor),
    )
