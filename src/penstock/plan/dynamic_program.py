"""The planner of the exact dynamic program; its recurrence is in `penstock.plan.chain_table`."""

from collections.abc import Iterator

from penstock.plan.candidate import Candidate
from penstock.plan.chain_table import device_orders, fill
from penstock.plan.choice import best_candidate
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.run_tables import run_tables
from penstock.plan.window_costs import CostSource

__all__ = ["dynamic_program", "pipeline_candidates"]


def dynamic_program(problem: PlanningProblem, score: Score) -> Plan:
    """The best of the plans that the recurrence of `chain_table.fill` finds.

    One exact table for every micro-batch size, schedule and device order; from each table the best
    plan for every number of stages and of devices. ``score`` judges them all.

    Raises:
        Infeasible: no plan fits; the message says what would.
    """
    return best_candidate(problem, pipeline_candidates(problem), score, planner="dynamic-program")


def pipeline_candidates(problem: PlanningProblem) -> Iterator[Candidate]:
    """The plans of all tables, each once."""
    seen: set[Plan] = set()
    tables = run_tables(problem)
    for micro_batch_size in problem.micro_batch_sizes:
        source = CostSource(problem, tables, micro_batch_size)
        for order in device_orders(problem):
            for schedule in problem.schedules:
                for candidate in fill(source, order, schedule).candidates():
                    if candidate.plan not in seen:
                        seen.add(candidate.plan)
                        yield candidate
