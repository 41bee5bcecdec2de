"""SPP's planner: device order by minimum cuts, exact partition, list schedule."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from penstock.costs.fit import as_deep_as_fits
from penstock.costs.tables import ChainCosts
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.choice import Candidate, best_candidate
from penstock.planners.coarse_chain import device_line, few_sizes_for_tables, likely_cuts
from penstock.planners.spp.device_order import recursive_device_order
from penstock.planners.spp.partition import partition

PREFERRED = ("wavefront", "early-backward", "1f1b", "gpipe")
"""SPP's own list order first, then the schedules most similar to it."""

THREADS = 2
"""Micro-batch sizes that are partitioned at the same time."""

TRIES = 4
"""Plans of each micro-batch size that are simulated."""

FEW_BLOCKS = 32
"""Number of blocks in which devices are placed where they are too many to be placed one by one. The
time of a table grows with the cube of the blocks, and there are several tables."""

MOST_CUTS = 96
"""Longer chains are cut at this number of likely places only."""


def spp(problem: PlanningProblem, score: Score) -> Plan:
    """SPP's plan for synchronous training on any graph of links (Luo et al., INFOCOM 2022).

        order = RDO(devices)
        for every micro-batch size and number of stages:   plan = PRM(order, stages)
        the plan whose execution ends first

    The paper has one micro-batch size and simulates every number of stages. Here a formula (fill,
    drain and workload) sorts the plans of all sizes, and ``score`` judges the first `TRIES` of each
    size. SPP's list order is the schedule 'wavefront'. Each plan is also judged under the most
    similar other schedule that is allowed. Mostly that is 'early-backward', which needs half the
    memory for the same time on balanced stages. The winner is judged under all other schedules.
    Where memory limits the plans, the other schedules get plans of their own.

    Of long chains, many sizes and many devices only some are tried: see `likely_cuts`,
    `few_sizes_for_tables` and `device_line`.
    """
    return spp_on_order(problem, score, recursive_device_order(problem.cluster))


def spp_on_order(problem: PlanningProblem, score: Score, order: tuple[int, ...]) -> Plan:
    """`spp` on a given order of devices, to compare orders."""
    first, *others = sorted(problem.schedules, key=preference)
    found: list[Candidate] = []
    for chain, sizes in attempts(problem):
        found = list(plans_of_stages(chain, order, sizes, first))
        if memory_counts(problem, found):
            for schedule in others:
                found += plans_of_stages(chain, order, sizes, schedule)
        if found:
            break
    best = best_candidate(problem, found, score, planner="spp", tries=TRIES)
    for name in others[:1]:
        found = [replace(one, plan=in_schedule(problem, one.plan, name)) for one in found]
        found.insert(0, Candidate(best, 0.0))
        best = best_candidate(problem, found, score, planner="spp", tries=TRIES + 1)
    others = [name for name in problem.schedules if name != best.schedule]
    return min([best, *(in_schedule(problem, best, name) for name in others)], key=score)


def in_schedule(problem: PlanningProblem, plan: Plan, name: str) -> Plan:
    """The plan in another order; where memory limits 'early-backward', as deep as that allows."""
    other = replace(plan, schedule=name, in_flight_limit=())
    return (as_deep_as_fits(problem, other) if name == "early-backward" else None) or other


def attempts(problem: PlanningProblem) -> Iterator[tuple[ChainCosts, tuple[int, ...]]]:
    """Cuts and micro-batch sizes to try: a few, and then all of them, if none of the few fits.

    If the few are all of them, there is one attempt.
    """
    every_cut = tuple(range(len(problem.profile.layers) + 1))
    few = (likely_cuts(problem, MOST_CUTS), few_sizes_for_tables(problem))
    for cuts, sizes in dict.fromkeys((few, (every_cut, tuple(sorted(problem.micro_batch_sizes))))):
        yield ChainCosts(problem, cuts), sizes


def memory_counts(problem: PlanningProblem, found: list[Candidate]) -> bool:
    """Return whether memory limits the best plans of the first schedule."""
    sizes = {candidate.plan.micro_batch_size for candidate in found}
    nearest = sorted(found, key=lambda candidate: candidate.estimate_s)[: TRIES * len(sizes)]
    return (
        not found
        or problem.recompute == "off"
        or any(stage.recompute for candidate in nearest for stage in candidate.plan.stages)
    )


def plans_of_stages(
    chain: ChainCosts, order: tuple[int, ...], sizes: tuple[int, ...], schedule: str
) -> Iterator[Candidate]:
    """PRM's plan for every micro-batch size and number of stages."""

    def of_size(size: int) -> list[Candidate]:
        line = device_line(order, size)
        if line.block > 1:
            line = device_line(order, size, FEW_BLOCKS)
        return list(partition(chain, line, size, schedule).candidates())

    with ThreadPoolExecutor(THREADS) as threads:
        for found in threads.map(of_size, sizes):
            yield from found


def preference(schedule: str) -> tuple[int, str]:
    """Sorts schedules by their similarity to SPP's."""
    known = schedule in PREFERRED
    return (PREFERRED.index(schedule) if known else len(PREFERRED), schedule)
