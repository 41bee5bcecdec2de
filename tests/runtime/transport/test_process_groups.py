"""A rank opens as few process groups in a large plan as in a small one."""

from itertools import permutations

from runtime.transport.group_counts import groups_made

from penstock.runtime.processes.launch import launch_workers


def test_the_groups_are_three_however_many_ranks_talk() -> None:
    """One for each direction of the pipeline, and one for sums."""
    assert launch_workers(groups_made, ([(0, 1), (1, 0)],), workers=2) == (3, 3)
    everyone = list(permutations(range(4), 2))
    assert launch_workers(groups_made, (everyone,), workers=4) == (3, 3, 3, 3)
