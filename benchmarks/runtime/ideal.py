"""Time of an order if nothing but its actions took time."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from penstock.schedule.action import Action

Seconds = Callable[[Action], float]
"""Seconds of an action."""


def ideal_s(orders: Sequence[Sequence[Action]], stages: int, seconds: Seconds) -> float:
    """The makespan of ``orders`` where each action starts once its rank and its inputs are ready.

    Nothing travels. F waits for F of the stage before; B and I wait for B or I of the stage after;
    W and R wait for nothing but their turn.
    """
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(orders)
    at = [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                ready = ready_s(action, stages, done)
                if ready is None:
                    break
                end = max(ready, free[rank]) + seconds(action)
                free[rank] = end
                way = "F" if action.kind == "F" else "B" if action.kind in "BI" else action.kind
                done[way, action.stage, action.micro_batch] = end
                at[rank] += 1
                left -= 1
        assert left < before, "the orders wait for one another"
    return max(free)


def ready_s(
    action: Action, stages: int, done: Mapping[tuple[str, int, int], float]
) -> float | None:
    """When the inputs of an action are there; ``None`` where that is not known yet."""
    if action.kind == "F" and action.stage > 0:
        return done.get(("F", action.stage - 1, action.micro_batch))
    if action.kind in "BI" and action.stage < stages - 1:
        return done.get(("B", action.stage + 1, action.micro_batch))
    return 0.0


def work_bound_s(orders: Sequence[Sequence[Action]], seconds: Seconds, cores: int) -> float:
    """All actions spread over ``cores`` without a gap: the bound where ranks share cores."""
    return sum(map(seconds, chain(*orders))) / cores
