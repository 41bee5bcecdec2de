"""What people would do without a pipeline: data parallelism, with less and less on each device.

A plan is compared with all of them, so that it is not praised for beating only the weakest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from penstock.document import Json
from penstock.errors import Infeasible
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.plan.problem import AS_FAST, PlanningProblem, Score
from penstock.planners.data_parallel import dividing_plan
from penstock.planning.answers import find_plan
from penstock.simulate.catalogue import workload_of
from penstock.simulate.compiled import play
from penstock.simulate.score import predict_plan
from penstock.words import seconds_text, size_text

PLAIN = "1f1b"
"""The schedule of plans of one stage, for which all synchronous schedules are the same."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A way to train without a pipeline: seconds of an iteration, and bytes on the fullest device.

    Both are infinite where it does not fit.
    """

    name: str
    iteration_s: float = inf
    peak_memory_bytes: float = inf

    def __str__(self) -> str:
        return f"{self.name} ({size_text(self.peak_memory_bytes)})"

    def to_json(self) -> dict[str, Json]:
        """Its numbers; null where it does not fit."""
        fits = self.iteration_s < inf
        return {
            "name": self.name,
            "iteration_s": self.iteration_s if fits else None,
            "peak_memory_bytes": self.peak_memory_bytes if fits else None,
        }


def best_rival(rivals: tuple[Rival, ...]) -> Rival | None:
    """The plainest that is about as fast as the fastest; None where none fits."""
    limit_s = min((rival.iteration_s for rival in rivals), default=inf) * (1 + AS_FAST)
    return next((rival for rival in rivals if rival.iteration_s <= limit_s < inf), None)


def rivals_line(rivals: Iterable[Rival]) -> str:
    """The times and the memory of all of them, in a line."""
    words = [
        f"{seconds_text(rival.iteration_s)} by {rival}"
        if rival.iteration_s < inf
        else f"{rival.name} does not fit"
        for rival in rivals
    ]
    return f"without a pipeline: {'; '.join(words)}"


def rivals_of(problem: PlanningProblem, score: Score) -> tuple[Rival, ...]:
    """Data parallelism in five kinds, whatever recompute the problem allows.

    The first two are the plans of `penstock.planners.data_parallel` that keep all activations, and
    that recompute by block. With ZeRO-1 all devices also divide the optimizer's state, and with
    FSDP the parameters too; they may do either (`penstock.costs.sharding`). The last is the first
    one where gradients are exchanged after the last backward, as in many papers' baselines.
    """
    plain = replace(problem, schedules=(PLAIN,), recompute="off", blocks="no", sharding="off")
    free = replace(plain, recompute="auto", blocks="allowed")
    found = [planned(plain, score), planned(replace(plain, blocks="always"), score)]
    found += [dividing_plan(free, score, sharding)[1] for sharding in ("optimizer", "parameters")]
    names = ("data parallelism", "data parallelism by block", "ZeRO-1", "FSDP")
    rivals = [rival(problem, name, plan) for name, plan in zip(names, found, strict=True)]
    late_s = without_overlap_s(problem, found[0]) if found[0] else inf
    late = replace(rivals[0], name="data parallelism without overlap", iteration_s=late_s)
    return (*rivals, late)


def without_overlap_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds of an iteration of a plan of one stage whose gradients wait for the last backward."""
    workload = workload_of(plan, problem.profile, problem.cluster, order_of(plan))
    stages = tuple(stage.summed_last() for stage in workload.parts.stages)
    return play(replace(workload, parts=replace(workload.parts, stages=stages))).iteration_s


def planned(problem: PlanningProblem, score: Score) -> Plan | None:
    """The plan of data parallelism for a problem; None where none fits."""
    try:
        return find_plan(problem, "data-parallel", score)
    except Infeasible:
        return None


def rival(problem: PlanningProblem, name: str, plan: Plan | None) -> Rival:
    if plan is None:
        return Rival(name)
    prediction = predict_plan(problem, plan, with_timeline=False)
    return Rival(name, prediction.iteration_s, max(prediction.peak_memory_bytes))
