"""Alternatives to a pipeline: data parallelism, with less and less on each device.

On one host of cards also a naive split (``device_map="auto"`` of transformers), in which one card
computes at a time, and FSDP with the optimizer's state in host memory.

A plan is compared with all of them, so that it is not praised for beating only the weakest.
"""

from dataclasses import dataclass, replace
from math import inf

from penstock.errors import Infeasible
from penstock.files import Json
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, with_state_on
from penstock.plan.problem import AS_FAST, PlanningProblem, Score
from penstock.planners.data_parallel import dividing_plan
from penstock.planners.find_plan import find_plan
from penstock.simulate.catalogue import workload_of
from penstock.simulate.compiled import play
from penstock.simulate.score import fits_hosts, make_score, predict_plan
from penstock.text import size_text

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


def rivals_of(problem: PlanningProblem, score: Score) -> tuple[Rival, ...]:
    """Data parallelism in five kinds, whatever recompute the problem allows, and those of cards.

    The first two are the plans of `penstock.planners.data_parallel` that keep all activations, and
    that recompute by block. With ZeRO-1 all devices also divide the optimizer's state, and with
    FSDP the parameters too; they may do either (`penstock.costs.sharding`). The fifth is the first
    one where gradients are exchanged after the last backward, as in many papers' baselines.
    """
    plain = replace(problem, schedules=(PLAIN,), recompute="off", blocks="no", sharding="off")
    free = replace(plain, recompute="auto", blocks="allowed")
    found = [planned(plain, score), planned(replace(plain, blocks="always"), score)]
    found += [dividing_plan(free, score, sharding) for sharding in ("optimizer", "parameters")]
    names = ("DDP", "DDP with activation checkpointing", "ZeRO-1", "FSDP")
    rivals = [rival(problem, name, plan) for name, plan in zip(names, found, strict=True)]
    late_s = without_overlap_s(problem, found[0]) if found[0] else inf
    late = replace(rivals[0], name="DDP without overlap", iteration_s=late_s)
    rivals.append(late)
    if is_host_of_cards(problem):
        rivals.append(naive_split(free))
        if problem.profile.host_step_s_per_byte:
            own = free.with_state_on("host")
            plan = dividing_plan(own, make_score(own), "parameters")
            on_host = with_state_on(plan, "host") if plan and fits_hosts(problem, plan) else None
            rivals.append(rival(free, f"FSDP, {ON_HOST}", on_host))
    return tuple(rivals)


MOST_CARDS = 16
"""Accelerators up to which one host is also compared with the rivals of a host of cards."""


def is_host_of_cards(problem: PlanningProblem) -> bool:
    """Return whether the cluster is one host of 2 to `MOST_CARDS` accelerators."""
    cluster = problem.cluster
    cards = [device for device in cluster.devices if device.kind != "cpu"]
    return len(cluster.hosts) == 1 and 1 < len(cards) <= MOST_CARDS


def naive_split(problem: PlanningProblem) -> Rival:
    """The model cut over as few cards as hold it; a micro-batch ends before the next begins."""
    best = Rival("naive split, one card at a time")
    stepless = replace(problem.profile, step_s_per_byte=0.0)
    for size in problem.micro_batch_sizes:
        one = replace(problem, global_batch=size, micro_batch_sizes=(size,), blocks="no")
        plan = planned(one, make_score(one), "gpipe")
        if plan is None:
            continue
        prediction = predict_plan(one, plan, with_timeline=False)
        pass_s = predict_plan(replace(one, profile=stepless), plan, with_timeline=False).iteration_s
        whole_s = prediction.iteration_s + (problem.global_batch // size - 1) * pass_s
        if whole_s < best.iteration_s:
            best = Rival(best.name, whole_s, max(prediction.peak_memory_bytes))
    return best


ON_HOST = "optimizer state in host memory"

QUICK = 0.1
"""The share of its usual effort with which `search` looks for a plan to compare with."""


def best_plans(problem: PlanningProblem, best: Plan) -> tuple[Rival, ...]:
    """The best plan for each place of the optimizer's state: ``best``, and what a search finds.

    Empty unless the problem has one host of cards, and a profile with a step in host memory.
    """
    known = replace(problem, state_on="auto")
    if not is_host_of_cards(problem) or len(known.places) == 1:
        return ()
    names = {"device": "optimizer state on the cards", "host": ON_HOST}
    found: list[Rival] = []
    for place in known.places:
        own, plan = replace(problem, state_on=place), best
        if place != best.state_on:
            plan = planned(own, make_score(own), "search", QUICK)
        found.append(rival(problem, f"best plan, {names[place]}", plan))
    return tuple(found)


def without_overlap_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds of an iteration of a plan of one stage whose gradients wait for the last backward."""
    workload = workload_of(plan, problem.profile, problem.cluster, order_of(plan))
    stages = tuple(stage.summed_last() for stage in workload.parts.stages)
    return play(replace(workload, parts=replace(workload.parts, stages=stages))).iteration_s


def planned(
    problem: PlanningProblem, score: Score, planner: str = "data-parallel", effort: float = 1.0
) -> Plan | None:
    """The planner's plan for a problem; None where none fits."""
    try:
        return find_plan(problem, planner, score, effort=effort)
    except Infeasible:
        return None


def rival(problem: PlanningProblem, name: str, plan: Plan | None) -> Rival:
    if plan is None:
        return Rival(name)
    prediction = predict_plan(problem, plan, with_timeline=False)
    return Rival(name, prediction.iteration_s, max(prediction.peak_memory_bytes))
