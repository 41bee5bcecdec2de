"""The plans of one row of the benchmark: one model on one cluster."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter, process_time

from penstock.advice.assessment import PlannedPipeline
from penstock.advice.baselines import rivals_of
from penstock.advice.compare import Comparison, compare_plans
from penstock.advice.explain import explain_plan, explanation_words
from penstock.cluster.cluster import Cluster, with_boundless_memory, with_devices
from penstock.cluster.toml_file import find_cluster
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import score_until
from penstock.planners.problem import AUTO, planning_problem, schedules_named
from penstock.planners.search.search import PLANNERS, STARTING_PLANNERS, rescheduled
from penstock.profile.find import find_profile
from penstock.schedule.registry import FAMILIES
from penstock.simulate.score import make_score

EXPLAINED_GAP = 0.05
WHOLE = "whole-backwards"

BATCHES = {
    "bert-48": 64,
    "xlnet-36": 128,
    "amoebanet-36": 128,
    "gnmt-16": 1024,
    "vgg-19": 2048,
    "resnet-50": 2048,
    "vgg-16": 2048,
    "inception-v3": 2048,
    "gnmt-8": 1024,
    "bert-32": 64,
}
"""Samples of an iteration: the papers' where they give one."""

CLUSTERS = ("dapple-a", "dapple-b", "dapple-c", "slow-link", "unequal", "graph")


@dataclass(frozen=True)
class Answer:
    """The answer of one planner to one problem."""

    planner: str
    iteration_s: float | None
    gap: float | None
    planning_cpu_s: float
    schedule: str = ""
    stages: str = ""
    micro_batches: int = 0
    peak_bytes: float = 0.0
    reason: str = ""


def cluster_of(name: str) -> Cluster:
    """A cluster of the benchmark: a preset, or one that differs from a preset in one respect."""
    match name:
        case "slow-link":
            cluster = find_cluster("dapple-c")
            hosts = tuple(replace(h, port_bytes_per_s=1e9 / 8) for h in cluster.hosts)
            return Cluster("slow-link: dapple-c with 1 Gb/s", hosts, cluster.links)
        case "unequal":
            return find_cluster("mixed-gpus")
        case "graph":
            return find_cluster("graph-8")
        case _:
            return find_cluster(name)


def problem_of(model: str, cluster: str) -> PlanningProblem:
    """The problem of a row; the schedules of each planner are chosen later.

    The papers' planners fill devices, so all memory is theirs; and the fastest plan is wanted.
    """
    return planning_problem(
        find_profile(model), cluster_of(cluster), BATCHES[model], memory_reserve=0.0, as_fast=0.0
    )


def run_row(model: str, cluster: str, limit_s: float) -> dict[str, object]:
    """All planners on one problem; what split backwards gain, also within the same memory.

    The published planners keep to their own schedules, and `search` looks over all. Where its plan
    splits backwards it is asked for one with whole backwards too. Every gap is above the bound for
    every order.
    """
    problem, start_s = problem_of(model, cluster), perf_counter()
    compared = list(compare_plans(problem, list(PLANNERS), [AUTO], process_time, limit_s=limit_s))
    published = [found for found in compared if found.planner != "search"]
    (search,) = (found for found in compared if found.planner == "search")
    whole, plan = search, plan_of(search)
    if plan and FAMILIES[plan.schedule].splits:
        (whole,) = compare_plans(problem, ["search"], [WHOLE], process_time, limit_s=limit_s)
    best = min([*published, whole], key=lambda found: found.iteration_s)
    planned, explanation = search.outcome, list[str]()
    if isinstance(planned, PlannedPipeline) and planned.gap > EXPLAINED_GAP:
        explanation = explanation_words(explain_plan(planned, problem))
    rivals = rivals_of(problem, make_score(problem))
    return {
        "model": model,
        "cluster": cluster,
        "batch": problem.global_batch,
        "devices": len(problem.cluster.devices),
        "norms": sum(layer.norms for layer in problem.profile.layers),
        **bound_of([*compared, whole]),
        "faster_than_whole_backwards": ratio(best, search),
        "whole_backwards": vars(answer_of(whole)),
        "equal_memory": within_memory_of(best, search, problem, limit_s),
        "explanation": explanation,
        "rivals": [rival.to_json() for rival in rivals],
        "wall_s": perf_counter() - start_s,
        "answers": [vars(answer_of(found)) for found in compared],
    }


def bound_of(comparisons: Iterable[Comparison]) -> dict[str, object]:
    """The bound that all gaps of a row are above."""
    for found in comparisons:
        values = found.to_json()
        if "iteration_s" in values:
            names = {"bound_s": "lower_bound_s"}
            names |= {name: name for name in ("bound_argument", "bound_covers")}
            return {key: values[name] for key, name in names.items()}
    return {"bound_s": 0.0, "bound_argument": "", "bound_covers": ""}


def within_memory_of(
    best: Comparison, search: Comparison, problem: PlanningProblem, limit_s: float
) -> dict[str, object]:
    """The plan of `search` if no device may hold more than the fullest one of ``best``.

    The plan that it found with all memory is the answer where that is within the limit already.
    """
    if not isinstance(best.outcome, PlannedPipeline):
        return {}
    most_bytes = max(best.outcome.prediction.peak_memory_bytes)
    found = search
    if peak_bytes_of(search) > most_bytes:
        cluster = with_devices(
            problem.cluster, lambda d: replace(d, memory_bytes=min(d.memory_bytes, most_bytes))
        )
        held = replace(problem, cluster=cluster)
        (found,) = compare_plans(held, ["search"], [AUTO], process_time, limit_s=limit_s)
    return {
        "memory_bytes": most_bytes,
        "faster": ratio(best, found),
        "answer": vars(answer_of(found)),
    }


def plan_of(found: Comparison) -> Plan | None:
    """The plan, if there is one."""
    return found.outcome.plan if isinstance(found.outcome, PlannedPipeline) else None


def peak_bytes_of(found: Comparison) -> float:
    """The most memory that a plan needs on any device."""
    planned = found.outcome
    return max(planned.prediction.peak_memory_bytes) if isinstance(planned, PlannedPipeline) else 0


def ratio(slower: Comparison, faster: Comparison) -> float | None:
    """The time of one plan as a multiple of another's; none where either is missing."""
    times = slower.iteration_s, faster.iteration_s
    return times[0] / times[1] if max(times) < inf else None


def answer_of(found: Comparison) -> Answer:
    """A comparison as it is kept in the results."""
    values = found.to_json()
    if "iteration_s" not in values:
        reason = str(values.get("infeasible") or values.get("failed"))
        return Answer(found.planner, None, None, found.planning_s, reason=reason)
    stages = [f"{s['layers'][1] - s['layers'][0]}x{len(s['devices'])}" for s in values["stages"]]
    return Answer(
        found.planner,
        values["iteration_s"],
        values["gap"],
        found.planning_s,
        values["schedule"],
        ":".join(stages),
        values["micro_batches"],
        peak_bytes_of(found),
    )


def every_schedule(model: str, cluster: str, limit_s: float) -> dict[str, object]:
    """The best plan of the published planners, each under each schedule that `search` may use.

    As `penstock compare --schedules all` asks them, but a plan that several planners make, or one
    planner for several schedules, is taken over by another schedule once. ``limit_s`` is for each
    of these; those that took longer are counted.
    """
    problem, start_s = problem_of(model, cluster), process_time()
    score = make_score(problem)
    answers: list[Answer] = []
    seen: set[object] = set()
    for planner in STARTING_PLANNERS:
        base = plan_without_limit(problem, planner)
        for name in schedules_named(AUTO, "search", norms=problem.profile.has_norms):
            planned = FAMILIES[name].is_planned
            case = (name, planner if planned else replace(base, planner="", schedule=""))
            if case in seen:
                continue
            seen.add(case)
            narrowed, began_s = replace(problem, schedules=(name,)), process_time()
            limited = score_until(score, began_s + limit_s, process_time)
            try:
                if planned:
                    plan = STARTING_PLANNERS[planner](narrowed, limited)
                else:
                    plan = rescheduled(narrowed, base, name, limited)
            except Infeasible:
                plan = None
            seconds = limited(plan) if plan else None
            answers.append(Answer(planner, seconds, None, process_time() - began_s, name))
            if plan and seconds:
                answers[-1] = replace(
                    answers[-1], stages=stages_words(plan), micro_batches=plan.micro_batches
                )
    best = min(answers, key=lambda answer: answer.iteration_s or inf)
    return {
        "model": model,
        "cluster": cluster,
        "every_schedule": {
            "best": vars(best),
            "asked": len(answers),
            "limit_s": limit_s,
            "over_the_limit": sum(answer.planning_cpu_s > limit_s for answer in answers),
            "cpu_s": process_time() - start_s,
        },
    }


def plan_without_limit(problem: PlanningProblem, planner: str) -> Plan:
    """The plan of a planner for its own schedules, with boundless memory where none fits."""
    own = replace(problem, schedules=PlanningProblem.schedules)
    try:
        return STARTING_PLANNERS[planner](own, make_score(own))
    except Infeasible:
        wide = replace(own, cluster=with_boundless_memory(own.cluster))
        return STARTING_PLANNERS[planner](wide, make_score(wide))


def stages_words(plan: Plan) -> str:
    """Layers and devices of each stage."""
    return ":".join(f"{len(stage.layers)}x{stage.replicas}" for stage in plan.stages)
