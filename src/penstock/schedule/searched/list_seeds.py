"""Policies that the list schedulers try first, the most useful one first.

Each was the best that a longer search found for some pipeline. Among these, the ones that shorten
the orders of all pipelines most were picked one by one. The pipelines are the cases of
`benchmarks/schedules/zero_bubble.py` with up to 32 micro-batches, and 36 random ones: up to four
stages a group, whole and split backwards, unequal stages, transfers, and 0.4 to 2 times the memory
of 1F1B. The last two policies are for four chunks on each of eight groups, as in
`benchmarks/schedules/torch_schedules.py`.
"""

from penstock.schedule.searched.list_policy import Policy

__all__ = ["SEEDS"]

ALL = 1e9
"""No limit."""

SEEDS: tuple[Policy, ...] = tuple(
    Policy(*numbers)
    for numbers in (
        (1.25, 1, 2.5, 3, 1 / 3, 1, 1.25, 0, 2, 0.1, ALL, 1, 0, 4, 0),
        (1, 0, 1.25, 1.25, 0, 1, 0.9, 0, 0, 0.5, 1, 0.3, 1 / 3, ALL, 0),
        (2, 2.5, 3, 3, 1 / 3, 1, 1, 1, 5, 0.5, ALL, 0.5, 0, ALL, 1),
        (0, 1.25, 3, 1.25, 0, 1, 0.5, 2, 1000, 0.1, 3, 0.3, 1, 2, 1),
        (2, 2.5, 1.5, 2, 0.5, 1, 0.75, 0, 1000, 0.1, ALL, 0, 0, ALL, 0),
        (2, 0, 2, 3, 1 / 6, 0.25, 2, 3, 1000, ALL, 3, ALL, 0, 1, 1),
        (1, 2, 0, 1, 1 / 6, 1, 0.9, 0, 1000, 0, 1, 0.3, 1 / 3, 2, 0),
        (1.25, 1, 2, 0, 1 / 6, 1.5, 0.75, 0, 1, 0, ALL, 1, 1 / 3, 1, 0),
        (1.5, 1, 2, 3, 1 / 6, 0.75, ALL, 0, 1000, 0.5, ALL, 0.3, 0, 2, 1),
        (1.25, 1, 2, 2, 0, 1.5, 0.5, 0, 5, 0.1, 2, 0.5, 0, ALL, 1),
        (2, 1, 3, 0, 0, 0.5, ALL, 0, 1, 0.5, ALL, ALL, 0, ALL, 1),
        (1.25, 1, 1.5, 1, 1 / 6, 1, 2, 0.5, 0.5, 0, 1, 0.5, 1 / 3, 0.5, 0),
        (0, 1.5, 1.25, 0, 1 / 3, 1.5, 0.75, 1, 1, ALL, ALL, 0, 1, 2, 1),
        (0, 2, 2, 0, 0, 1, 1.1, 0, 1, 0.5, ALL, ALL, 0, 2, 1),
        (3, 1, 1.25, 1.5, 1 / 6, 1, 1.5, -0.5, 0, 0, ALL, 0.3, -1 / 3, ALL, 0),
        (1, 1, 1, 0, 0, 1, ALL, 0, 0, 0.5, ALL, ALL, 0, 0, 1),
        (1, 2, 1, 2, 1 / 3, 1, 1, 0, 0, ALL, ALL, 0.5, 0, ALL, 0),
        (2, 1, 1, 1, 0, 1, ALL, 0, 1000, 0.5, ALL, 1, 1, ALL, 1),
        (2, 1, 3, 3, 0, 0.5, ALL, 1, 5, 0, 2, ALL, 0, ALL, 1),
        (3, 1, 1, 2, 1 / 6, 1, 1.25, 0, 1, 0, 1, 1, 0, ALL, 1),
        (1, 2, 3, 1, 0, 0.75, ALL, 1, 5, 0.1, ALL, 0.3, 0, 4, 1),
        (2, 3, 2, 2.5, 0, 0.5, 1.5, 1, 5, 0.1, ALL, 0.5, 0, ALL, 1),
        (1.25, 1.5, 2, 2, 1 / 3, 0.75, 1, -0.5, 0.5, 0.1, 3, 0.5, 1 / 3, ALL, 0),
        (1, 1, 1, 0, 0, 0.5, ALL, 0, 0, 0.5, 2, 0, 0, ALL, 1),
        (1.5, 2, 3, 1.5, 0, 0.75, ALL, 3, 5, 0.1, ALL, 0.5, 0, 4, 1),
        (2, 1, 2.5, 1, 0, 1, ALL, 2, 2, 0, 2, 1, -1, ALL, 0),
        (2, 1, 2.5, 0, 0, 0.5, 0.75, 0, 1, 0.5, 2, 0, 1, ALL, 1),
        (1.5, 1.5, 3, 1.25, 0, 0.5, ALL, 0.5, 1000, ALL, ALL, 0.3, 0, ALL, 1),
        (1.25, 1.25, 1.5, 3, 0, 0.25, ALL, 3, 2, 0.5, ALL, ALL, 0, ALL, 1),
        (1.25, 2.5, 3, 1.25, 0, 0.75, ALL, 3, 5, 0.3, ALL, 0.5, 0, ALL, 1),
    )
)
"""Numbers in the order of the fields of `Policy`."""
