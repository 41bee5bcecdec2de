"""The micro-batch sizes for planners that try only a few."""

from penstock.plan.problem import PlanningProblem
from penstock.planners.device_line import MOST_BLOCKS

__all__ = ["few_sizes", "few_sizes_for_tables"]

MOST_SIZES = 8
"""The most micro-batch sizes that are tried."""


def few_sizes_for_tables(problem: PlanningProblem) -> tuple[int, ...]:
    """`few_sizes` for planners that fill large tables: half as many on more than `MOST_BLOCKS`.

    Then those in the middle are taken. Smaller ones make many small messages, and larger ones leave
    few micro-batches to a pipeline.
    """
    if len(problem.cluster.devices) <= MOST_BLOCKS:
        return few_sizes(problem)
    sizes, count = few_sizes(problem, len(problem.micro_batch_sizes)), MOST_SIZES // 2
    first = max(0, len(sizes) - count) // 2
    return sizes[first : first + count]


def few_sizes(problem: PlanningProblem, count: int = MOST_SIZES) -> tuple[int, ...]:
    """At most ``count`` micro-batch sizes, spread evenly over those worth trying.

    Sizes that cut the batch into more than 8 micro-batches a device (at least 64) are left out.
    Fill and drain are a small part of such an iteration (GPipe: negligible from 4 a stage), and
    more micro-batches only make messages smaller.
    """
    most = max(64, 8 * len(problem.cluster.devices))
    sizes = sorted(
        {size for size in problem.micro_batch_sizes if problem.global_batch // size <= most}
    )
    sizes = sizes or [max(problem.micro_batch_sizes)]
    if len(sizes) <= count:
        return tuple(sizes)
    places = [round(i * (len(sizes) - 1) / (count - 1)) for i in range(count)]
    return tuple(sizes[place] for place in places)
