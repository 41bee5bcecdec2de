"""The default planner: the best of what the others make, judged by the simulator."""

from dataclasses import replace

from penstock.errors import Infeasible
from penstock.plan.data_parallel import data_parallel
from penstock.plan.dynamic_program import dynamic_program
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.single_device import single_device

__all__ = ["search"]


def search(problem: PlanningProblem, score: Score) -> Plan:
    """The best of the dynamic program's plans, data parallelism and one device.

    So its plan is never worse than any of them under the same score; of equal ones it takes that
    on the fewest devices.

    Raises:
        Infeasible: no plan fits; the message says what would.
    """
    plans: list[Plan] = []
    for planner in (dynamic_program, data_parallel, single_device):
        try:
            plans.append(planner(problem, score))
        except Infeasible:
            continue
    if not plans:
        raise infeasible(problem, "search")
    best = min(plans, key=lambda plan: (score(plan), len(plan.devices)))
    return replace(best, planner="search")
