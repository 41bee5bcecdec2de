"""The whole model on one device: what everything else is compared with."""

from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.choice import best_candidate
from penstock.planners.data_parallel import one_stage_candidates

__all__ = ["single_device"]


def single_device(problem: PlanningProblem, score: Score) -> Plan:
    """One stage on the fastest device, by the best micro-batch size.

    Raises:
        Infeasible: it does not fit; the message says what would.
    """
    candidates = one_stage_candidates(problem, 1)
    return best_candidate(problem, candidates, score, planner="single-device")
