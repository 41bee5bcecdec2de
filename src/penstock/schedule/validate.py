"""Checks that a schedule can run: complete, well placed, free of deadlock, within its limits."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import BadInput
from penstock.schedule.action import ACTION_KINDS, KIND_CODES, Action
from penstock.schedule.clock import memory_peaks_bytes, play_as_far_as_possible
from penstock.schedule.dependencies import predecessors
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.recompute import needs_recompute
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import ROUNDING, PipelineShape

FORWARD, WHOLE, INPUTS, WEIGHTS, RECOMPUTE = (KIND_CODES[kind] for kind in ACTION_KINDS)


def validate(schedule: Schedule, shape: PipelineShape) -> None:
    """Check that every rank can run ``schedule`` to its end; raise at the first violation.

    The checks: each stage's actions are on its device group; every micro-batch passes every stage
    forward and backward once; R is exactly where it is needed; no actions wait for one another in a
    cycle; messages are received in the order in which they are sent; no stage exceeds its in-flight
    limit; and no group saves more bytes than it has memory.
    """
    check_playable(schedule, shape)
    check_channels(schedule, shape)
    if words := excess(schedule, shape):
        raise BadInput(
            f"the schedule {words}; use one that keeps fewer micro-batches in flight, or recompute"
        )


def check_playable(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless the schedule is complete, well placed and free of deadlock."""
    check_places(schedule, shape)
    check_complete(schedule, shape)
    check_recomputes(schedule, shape)
    check_deadlock_free(schedule, shape)


def check_places(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless every action has a stage of its group and a micro-batch, and occurs once."""
    if len(schedule.orders) != shape.groups:
        raise BadInput(
            f"the schedule orders {len(schedule.orders)} device groups, the pipeline has "
            f"{shape.groups}; give one order for each"
        )
    groups = np.array(shape.ways)
    for group, order in enumerate(schedule.orders):
        stages, micro = order.stages, order.micro_batches
        outside = (
            (stages < 0) | (stages >= shape.stages) | (micro < 0) | (micro >= shape.micro_batches)
        )
        for action in chosen(order, outside):
            raise BadInput(
                f"action {action} of group {group} is outside {shape.stages} stages and "
                f"{shape.micro_batches} micro-batches; both are numbered from 0"
            )
        for action in chosen(order, groups[micro % len(groups), stages] != group):
            raise BadInput(
                f"action {action} stands in the order of group {group}, but stage "
                f"{action.stage} is on group {shape.group_of(action.stage, action.micro_batch)}"
                f"{' for this micro-batch' if shape.mirrored else ''}; move it there"
            )
        numbers = (order.kinds * np.int64(shape.stages) + stages) * shape.micro_batches + micro
        in_order = np.sort(numbers)
        for number in in_order[1:][in_order[1:] == in_order[:-1]].tolist():
            action = order[int(np.flatnonzero(numbers == number)[1])]
            raise BadInput(
                f"action {action} stands twice in the order of group {group}; once is allowed"
            )


def chosen(order: Order, mask: npt.NDArray[np.bool_]) -> Iterator[Action]:
    """The actions of an order where ``mask`` is true."""
    return (order[int(index)] for index in np.flatnonzero(mask))


def check_complete(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless every stage has each micro-batch's forward and backward."""
    present = np.zeros((len(ACTION_KINDS), shape.stages, shape.micro_batches), dtype=np.bool_)
    for order in schedule.orders:
        present[order.kinds, order.stages, order.micro_batches] = True
    halves = present[INPUTS] & present[WEIGHTS] & ~present[WHOLE]
    whole = present[WHOLE] & ~present[INPUTS] & ~present[WEIGHTS]
    wrong = np.argwhere(~(present[FORWARD] & (halves | whole)))
    if len(wrong):
        stage, m = wrong[0].tolist()
        found = set(np.flatnonzero(present[:, stage, m]).tolist()) - {RECOMPUTE}
        kinds = sorted(ACTION_KINDS[code] for code in found)
        raise BadInput(
            f"stage {stage}, micro-batch {m} has the actions {' '.join(kinds) or 'none'}; it needs "
            f"F and either B or both I and W"
        )


def check_recomputes(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless R precedes exactly the backwards that need it."""
    for order in schedule.orders:
        recomputed = order.kinds == RECOMPUTE
        if not recomputed.any() and not any(shape.recompute):
            continue
        without = order_from_arrays(
            order.kinds[~recomputed], order.stages[~recomputed], order.micro_batches[~recomputed]
        )
        needed = cells_of(without, shape)[needs_recompute(without, shape)]
        given = cells_of(order, shape)[recomputed]
        for action in recomputes_of(np.setdiff1d(needed, given), shape):
            raise BadInput(
                f"stage {action.stage} recomputes, but {action} is missing before the backward of "
                f"micro-batch {action.micro_batch}; insert it"
            )
        for action in recomputes_of(np.setdiff1d(given, needed), shape):
            keeps = "keeps all"
            if shape.recomputes(action.stage):
                keeps = "has only just run its forward"
            raise BadInput(f"{action} is not needed: stage {action.stage} {keeps}; leave it out")


def cells_of(order: Order, shape: PipelineShape) -> npt.NDArray[np.int64]:
    """Stage and micro-batch of every action, combined into one number (a cell)."""
    return order.stages * np.int64(shape.micro_batches) + order.micro_batches


def recomputes_of(cells: npt.NDArray[np.int64], shape: PipelineShape) -> Iterator[Action]:
    """The action R of each cell."""
    return (Action("R", *divmod(cell, shape.micro_batches)) for cell in cells.tolist())


def check_deadlock_free(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise if orders and dependencies together have a cycle, by playing the schedule."""
    _, played = play_as_far_as_possible(schedule, shape)
    left = [order[stop:] for order, stop in zip(schedule.orders, played, strict=True)]
    if any(left):
        cycle = cycle_of(wait_graph(left, shape))
        words = " waits for ".join(map(str, [*cycle, cycle[0]]))
        raise BadInput(
            f"the schedule deadlocks: {words}; reorder these actions "
            f"(warm-up depths must not grow from one stage to the next)"
        )


def excess(schedule: Schedule, shape: PipelineShape) -> str:
    """The first limit of the shape that a schedule exceeds, in words; empty if none.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> deep = one_f_one_b(PipelineShape(stages=2, micro_batches=4))
    >>> excess(deep, PipelineShape(stages=2, micro_batches=4, in_flight_limit=(1, 1)))
    'holds 2 on stage 0, whose in-flight limit is 1'
    """
    if shape.in_flight_limit:
        for stage, peak in enumerate(in_flight_peaks(schedule, shape)):
            if peak > shape.limit(stage):
                return (
                    f"holds {peak} on stage {stage}, whose in-flight limit is {shape.limit(stage)}"
                )
    if shape.memory_bytes:
        peaks = memory_peaks_bytes(schedule, shape)
        for group, (peak, room) in enumerate(zip(peaks, shape.memory_bytes, strict=True)):
            if peak > room * ROUNDING:
                return (
                    f"saves {peak:.6g} bytes on device group {group}, which has room for {room:.6g}"
                )
    return ""


def in_flight_peaks(schedule: Schedule, shape: PipelineShape) -> tuple[int, ...]:
    """The most micro-batches of each stage between forward and the end of backward (B or W).

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> shape = PipelineShape(stages=3, micro_batches=8)
    >>> in_flight_peaks(one_f_one_b(shape), shape)
    (3, 2, 1)
    """
    changes = np.zeros(len(ACTION_KINDS), dtype=np.int64)
    changes[[FORWARD, WHOLE, WEIGHTS]] = 1, -1, -1
    peaks = [0] * shape.stages
    for order in schedule.orders:
        numbers: list[int] = np.unique(order.stages).tolist()
        for stage in numbers:
            held: list[int] = np.cumsum(changes[order.kinds[order.stages == stage]]).tolist()
            peaks[stage] = max(peaks[stage], *held)
    return tuple(peaks)


def wait_graph(left: Sequence[Order], shape: PipelineShape) -> dict[Action, list[Action]]:
    """Actions that each one waits for: its predecessor in the order, and its dependencies."""
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


FORWARDS = np.array([kind == "F" for kind in ACTION_KINDS])
GRADIENTS = np.array([kind in ("B", "I") for kind in ACTION_KINDS])
"""By kind code: whether such an action sends activations, and whether it sends gradients."""


def check_channels(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless every stage receives messages in the order in which its neighbour sends them.

    Two neighbouring stages share one channel for activations and one for gradients (two of each
    on a mirrored pipeline). A channel delivers in order, so a receiver that waits for a message
    other than the next one deadlocks.
    """
    for direction in range(len(shape.ways)):
        for kinds, word in ((FORWARDS, "activations"), (GRADIENTS, "gradients")):
            sent = [passed(schedule, shape, s, direction, kinds) for s in range(shape.stages)]
            for stage in range(shape.stages - 1):
                if shape.group_of(stage) == shape.group_of(stage + 1):
                    continue
                first, second = sent[stage], sent[stage + 1]
                for place in np.flatnonzero(first != second)[:1]:
                    here, there = first[place], second[place]
                    raise BadInput(
                        f"the {word} of micro-batches {here} and {there} overtake one another "
                        f"between stages {stage} and {stage + 1}: one has {here} first, the other "
                        f"{there}; let both work on micro-batches in the same order"
                    )


def passed(
    schedule: Schedule,
    shape: PipelineShape,
    stage: int,
    direction: int,
    kinds: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int32]:
    """The micro-batches of one direction, in the order in which ``stage`` works on them."""
    order = schedule.of(shape.group_of(stage, direction))
    mine = (order.stages == stage) & kinds[order.kinds]
    if shape.mirrored:
        mine &= order.micro_batches % 2 == direction
    return order.micro_batches[mine]
