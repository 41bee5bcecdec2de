"""The default planner: all planners' candidates, judged by the simulator."""

from penstock.plan.choice import best_candidate
from penstock.plan.data_parallel import one_stage_candidates
from penstock.plan.dynamic_program import pipeline_candidates
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score

__all__ = ["search"]


def search(problem: PlanningProblem, score: Score) -> Plan:
    """The best of the dynamic program's plans, data parallelism and one device.

    So its plan is never worse than any of them under the same score.

    Raises:
        Infeasible: no plan fits; the message says what would.
    """
    candidates = list(pipeline_candidates(problem))
    for count in range(1, len(problem.cluster.devices) + 1):
        candidates += one_stage_candidates(problem, count)
    return best_candidate(problem, candidates, score, planner="search")
