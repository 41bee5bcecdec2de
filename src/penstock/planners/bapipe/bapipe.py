"""BaPipe's planner: explores schedules, micro-batch sizes and balanced straight pipelines."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import Infeasible
from penstock.plan.candidate import Candidate
from penstock.plan.cost_tables import whole_chain
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.bapipe.formulas import METHODS
from penstock.planners.bapipe.pipeline import StraightPipeline, is_asynchronous
from penstock.planners.choice import best_candidate
from penstock.planners.data_parallel import one_stage_candidates
from penstock.planners.sizes import few_sizes

__all__ = ["bapipe", "methods_for"]

TRIES = 1
"""Plans of each micro-batch size that are simulated."""


def bapipe(problem: PlanningProblem, score: Score) -> Plan:
    """BaPipe's plan: a straight pipeline over all accelerators, or data parallelism.

    A pipeline is made for every micro-batch size and every schedule that the problem allows. Of
    BaPipe's own four schedules only those for the accelerators count (`methods_for`). The steps:

    1. inter-layer partition in proportion to speed;
    2. coarse-grained partition, where a boundary's transfer takes longer than a stage computes;
    3. memory fine tuning;
    4. the closed form of the schedule.

    Data parallelism has ``M * P`` and one all-reduce that overlaps nothing. BaPipe's formulas
    choose between the two kinds of plan, and the schedule of every micro-batch size. ``score``
    chooses among the sizes.

    Other schedules are judged by the closed form of the most similar one of BaPipe's own. For
    FPGAs, the estimate counts the split inside layers, but the plan holds whole layers. BaPipe does
    not recompute. Recompute is tried only where nothing fits without, or where the problem requires
    it.

    Source: Zhao et al., arXiv 2012.12544.

    Raises:
        Infeasible: no plan fits; the message says what would.
    """
    problem = replace(problem, schedules=methods_for(problem))
    every_size = tuple(sorted(problem.micro_batch_sizes))
    for sizes in dict.fromkeys((few_sizes(problem), every_size)):
        for recompute in problem.recompute_choices:
            few = replace(problem, micro_batch_sizes=sizes, recompute="on" if recompute else "off")
            pipelines = list(pipeline_candidates(few, recompute=recompute))
            whole = list(data_parallel_candidates(few))
            kinds = sorted((found for found in (pipelines, whole) if found), key=least_s)
            for found in kinds:
                try:
                    return best_candidate(problem, found, score, planner="bapipe", tries=TRIES)
                except Infeasible:
                    continue
    raise infeasible(problem, "bapipe")


def least_s(found: list[Candidate]) -> float:
    """The least estimate."""
    return min(candidate.estimate_s for candidate in found)


def data_parallel_candidates(problem: PlanningProblem) -> Iterator[Candidate]:
    """The whole model on every device."""
    count = min(len(problem.cluster.devices), max(problem.micro_batch_sizes))
    return one_stage_candidates(problem, count)


def methods_for(problem: PlanningProblem) -> tuple[str, ...]:
    """The allowed schedules; of BaPipe's own, only those for the cluster's accelerators.

    Names that end in -as are for accelerators with ``concurrent_passes``, such as FPGAs. If nothing
    is left, all allowed schedules.
    """
    asynchronous = is_asynchronous(problem.cluster)
    fitting = tuple(
        name
        for name in problem.schedules
        if name not in METHODS or name.endswith("-as") == asynchronous
    )
    return fitting or problem.schedules


def pipeline_candidates(problem: PlanningProblem, *, recompute: bool) -> Iterator[Candidate]:
    """A balanced straight pipeline for every micro-batch size and schedule, where one fits."""
    chain = whole_chain(problem)
    for size in problem.micro_batch_sizes:
        for schedule in problem.schedules:
            pipeline = StraightPipeline(chain, size, schedule, recompute)
            if cuts := pipeline.cuts():
                yield Candidate(pipeline.plan(cuts), pipeline.estimate_s(cuts))
