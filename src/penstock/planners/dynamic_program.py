"""The planner of the exact dynamic program; its recurrence is in `chain_table`."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.plan.candidate import Candidate
from penstock.plan.cost import leanest_schedule
from penstock.plan.leanest import device_orders
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.problem_memo import remembered
from penstock.plan.run_tables import run_tables
from penstock.plan.window_costs import CostSource
from penstock.planners.chain_table import MOST_CUTS, fill
from penstock.planners.choice import best_candidate
from penstock.planners.coarse_chain import likely_cuts

__all__ = ["dynamic_program", "known_candidates", "pipeline_candidates"]


CANDIDATES_OF_A_TABLE = 16
"""The best of a table that are considered further."""

SCORED = 60
"""Of all tables' candidates those with the least estimates, which the simulator judges."""


def dynamic_program(problem: PlanningProblem, score: Score) -> Plan:
    """The best of the plans that the recurrence of `chain_table.fill` finds.

    One table for every micro-batch size and device order; from each table the best plans for every
    number of stages and of devices. ``score`` judges those with the least estimates.

    Raises:
        Infeasible: no plan fits; the message says what would.
    """
    candidates = sorted(known_candidates(problem), key=lambda candidate: candidate.estimate_s)
    return best_candidate(problem, candidates[:SCORED], score, planner="dynamic-program")


@remembered
def known_candidates(problem: PlanningProblem) -> tuple[Candidate, ...]:
    """`pipeline_candidates`, found once: the search starts from them too."""
    return tuple(pipeline_candidates(problem))


def pipeline_candidates(problem: PlanningProblem) -> Iterator[Candidate]:
    """The plans of all tables, each once, and each under every schedule.

    The objective knows a schedule only by its memory, so the one with the fewest micro-batches in
    flight has the least objective; the simulator tells the others apart.
    """
    schedule = leanest_schedule(problem)
    others = [name for name in problem.schedules if name != schedule]
    seen: set[Plan] = set()
    tables = run_tables(problem)
    cuts = likely_cuts(problem, MOST_CUTS)
    for micro_batch_size in problem.micro_batch_sizes:
        source = CostSource(problem, tables, micro_batch_size, cuts)
        for order in device_orders(problem):
            for candidate in fill(source, order, schedule).candidates(CANDIDATES_OF_A_TABLE):
                if candidate.plan not in seen:
                    seen.add(candidate.plan)
                    yield candidate
                    for name in others:
                        yield replace(candidate, plan=replace(candidate.plan, schedule=name))
