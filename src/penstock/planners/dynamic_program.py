"""The exact dynamic program over cuts, devices and replicas, with fill and drain."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import numpy as np

from penstock.costs.leanest import device_orders
from penstock.costs.stage_costs import leanest_schedule
from penstock.costs.tables import ChainCosts
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score, remembered_by_schedules
from penstock.planners.choice import Candidate, best_candidate
from penstock.planners.coarse_chain import device_line, likely_cuts
from penstock.planners.spp.partition import PartitionTable, partition

MOST_CUTS = 100
"""Longer chains are cut at likely places only: a table grows with the square of the cuts."""

MOST_BLOCKS = 16
"""Number of devices above which a stage takes whole blocks of neighbours."""

CANDIDATES_OF_A_TABLE = 16
"""The number of best plans of a table that become candidates."""

SCORED = 60
"""The number of candidates, those with the least estimates, that the simulator judges."""


def dynamic_program(problem: PlanningProblem, score: Score) -> Plan:
    """The best of the plans found by the recurrence of `partition` with fill and drain.

    There is one table for every micro-batch size and device order. Candidates are the best plans of
    each table for every number of stages and of devices. ``score`` judges those with the least
    estimates.
    """
    candidates = sorted(known_candidates(problem), key=lambda candidate: candidate.estimate_s)
    return best_candidate(problem, candidates[:SCORED], score, planner="dynamic-program")


@remembered_by_schedules
def known_candidates(problem: PlanningProblem) -> tuple[Candidate, ...]:
    """`plans_of_tables`, computed once for each problem."""
    return tuple(plans_of_tables(problem))


def plans_of_tables(problem: PlanningProblem) -> Iterator[Candidate]:
    """The plans of all tables, each once, and each under every schedule.

    The objective depends on a schedule only by its memory. So the schedule with the fewest
    micro-batches in flight has the least objective, and the simulator compares the others.
    """
    schedule = leanest_schedule(problem)
    others = [name for name in problem.schedules if name != schedule]
    seen: set[Plan] = set()
    chain = ChainCosts(problem, likely_cuts(problem, MOST_CUTS))
    for micro_batch_size in problem.micro_batch_sizes:
        for order in device_orders(problem):
            table = table_of(chain, order, micro_batch_size, schedule)
            for candidate in plans_of_table(table, CANDIDATES_OF_A_TABLE):
                if candidate.plan not in seen:
                    seen.add(candidate.plan)
                    yield candidate
                    for name in others:
                        yield replace(candidate, plan=replace(candidate.plan, schedule=name))


def table_of(
    chain: ChainCosts, order: tuple[int, ...], micro_batch_size: int, schedule: str
) -> PartitionTable:
    line = device_line(order, micro_batch_size, MOST_BLOCKS)
    return partition(chain, line, micro_batch_size, schedule, drains=True)


def plans_of_table(table: PartitionTable, most: int = 0) -> Iterator[Candidate]:
    """The best plan for every number of stages on every end of the device order.

    If ``most`` is not 0, only the ``most`` best.
    """
    best_s = table.workloads()
    found = sorted((float(best_s[k, p]), int(k), int(p)) for k, p in np.argwhere(best_s < inf))
    for seconds, k, position in found[: most or len(found)]:
        yield Candidate(table.plan(k, position), seconds)
