"""Run by each rank: how many process groups its transport needs."""

from penstock.runtime.processes.world import join_world
from penstock.runtime.transport.process_groups import GroupTransport


def groups_made() -> int:
    """The process groups that opening a transport adds."""
    world = join_world("cpu", 60.0)
    before = len(world.groups)
    GroupTransport(world)
    made = len(world.groups) - before
    world.leave()
    return made
