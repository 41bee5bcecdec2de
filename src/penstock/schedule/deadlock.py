"""Explains a deadlock: which actions wait for one another in a cycle."""

from collections.abc import Sequence

from penstock.schedule.action import Action
from penstock.schedule.dependencies import predecessors
from penstock.schedule.order import Order
from penstock.schedule.shape import PipelineShape

__all__ = ["explain_deadlock"]


def explain_deadlock(left: Sequence[Order], shape: PipelineShape) -> str:
    """A sentence that names a cycle among ``left``, the actions that cannot be played."""
    waits_for = wait_graph(left, shape)
    return (
        f"the schedule deadlocks: {describe_cycle(cycle_of(waits_for))}; reorder these actions "
        f"(warm-up depths must not grow from one stage to the next)"
    )


def wait_graph(left: Sequence[Order], shape: PipelineShape) -> dict[Action, list[Action]]:
    """For each action the ones it waits for: its predecessor in the order, and its dependencies."""
    present = {action for order in left for action in order}
    graph: dict[Action, list[Action]] = {}
    for order in left:
        previous: list[Action] = []
        for action in order:
            before = [a for a in predecessors(action, shape) if a in present]
            graph[action] = [*previous, *before]
            previous = [action]
    return graph


def cycle_of(stuck: dict[Action, list[Action]]) -> list[Action]:
    """A cycle of a graph in which every node waits for another; its least action comes first."""
    path = [min(stuck)]
    while path[-1] not in path[:-1]:
        path.append(stuck[path[-1]][-1])
    cycle = path[path.index(path[-1]) : -1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


def describe_cycle(cycle: list[Action]) -> str:
    """The cycle as a sentence that starts and ends at the same action."""
    return " waits for ".join(str(action) for action in [*cycle, cycle[0]])
