"""What a plan would gain from a small change, and whether memory forbids it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.memory import with_boundless_memory
from penstock.plan.cost import peak_memory_bytes
from penstock.plan.plan import Plan, with_cut, with_recompute
from penstock.plan.problem import PlanningProblem
from penstock.simulate.score import make_score

__all__ = [
    "Change",
    "Fullness",
    "best_forbidden",
    "changes_of",
    "fullest_device",
    "fullest_of",
]

LEAST_GAIN = 1e-3
"""A smaller gain, as a part of the iteration, is not mentioned."""


@dataclass(frozen=True, slots=True)
class Fullness:
    """A device with the bytes that a plan needs, the bytes that it may use, and the reserve."""

    device: int
    needed_bytes: float
    limit_bytes: float
    reserved_bytes: float = 0.0

    @property
    def share(self) -> float:
        """The part of the limit that is needed; above 1 where the plan does not fit."""
        return self.needed_bytes / self.limit_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A plan that differs in one respect, in words; its seconds, and its fullest device."""

    text: str
    plan: Plan
    iteration_s: float = 0.0
    fullest: Fullness | None = None


def best_forbidden(problem: PlanningProblem, plan: Plan, stage: int) -> Change | None:
    """Of the small changes to ``plan`` that memory alone forbids, the one that gains most.

    ``stage`` is the one whose layers are moved. None where no such change gains `LEAST_GAIN` of the
    iteration.
    """
    free_score = make_score(replace(problem, cluster=with_boundless_memory(problem.cluster)))
    best, best_s = None, free_score(plan) * (1 - LEAST_GAIN)
    for change in changes_of(plan, stage):
        fullest = fullest_device(problem, change.plan)
        if fullest.share <= 1:
            continue
        seconds = free_score(change.plan)
        if seconds < best_s:
            best, best_s = replace(change, iteration_s=seconds, fullest=fullest), seconds
    return best


def changes_of(plan: Plan, stage: int) -> Iterator[Change]:
    """The plan without recompute, with one layer of ``stage`` moved, or with a deeper warm-up."""
    if any(s.recompute for s in plan.stages):
        yield Change("keeping all activations", with_recompute(plan, False))
    layers = plan.stages[stage].layers
    if len(layers) > 1:
        if stage > 0:
            text = f"moving layer {layers.start} from stage {stage} to stage {stage - 1}"
            yield Change(text, with_cut(plan, stage, layers.start + 1))
        if stage + 1 < len(plan.stages):
            text = f"moving layer {layers.stop - 1} from stage {stage} to stage {stage + 1}"
            yield Change(text, with_cut(plan, stage + 1, layers.stop - 1))
    if plan.in_flight_limit:
        yield Change("keeping more micro-batches in flight", replace(plan, in_flight_limit=()))


def fullest_device(problem: PlanningProblem, plan: Plan) -> Fullness:
    """The device with the largest part of its memory needed by ``plan``."""
    peaks = dict(zip(plan.devices, peak_memory_bytes(problem, plan), strict=True))
    return fullest_of(problem.cluster, peaks)


def fullest_of(cluster: Cluster, peaks: Mapping[int, float]) -> Fullness:
    """The device with the largest part of its memory in use, from the peak bytes of each."""
    fullnesses = (
        Fullness(index, peak, device.memory_bytes, device.reserved_bytes)
        for index, peak in peaks.items()
        for device in [cluster.devices[index]]
    )
    return max(fullnesses, key=lambda fullness: fullness.share)
