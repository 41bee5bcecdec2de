"""A rank opens as few process groups in a large plan as in a small one."""

from runtime.transport.group_counts import groups_made

from penstock.runtime.processes.launch import launch_workers


def test_the_groups_are_three_however_many_ranks_talk() -> None:
    """One for each direction of the pipeline, and one for sums."""
    for workers in (2, 4):
        assert launch_workers(groups_made, (), workers=workers) == (3,) * workers
