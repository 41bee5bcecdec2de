"""All schedules of a very small pipeline: slow, and obvious."""

from itertools import permutations, product
from math import inf

from penstock.errors import BadInput
from penstock.schedule.action import Action, ActionKind
from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import in_flight_peaks


def enumerated_makespan_s(shape: PipelineShape, *, split: bool) -> float:
    """The least makespan of all orders of all groups, micro-batches in any sequence."""
    best_s = inf
    for orders in product(*(orders_of(shape, group, split) for group in range(shape.groups))):
        schedule = Schedule(orders)
        try:
            taken_s = makespan_s(schedule, shape)
        except BadInput:
            continue
        if taken_s < best_s and keeps_limits(schedule, shape):
            best_s = taken_s
    return best_s


def orders_of(shape: PipelineShape, group: int, split: bool) -> list[Order]:
    """Every sequence of a group's actions that has F, I and W of a stage in this order."""
    kinds: tuple[ActionKind, ...] = ("F", "I", "W") if split else ("F", "B")
    actions = [
        Action(kind, stage, m)
        for stage in range(shape.stages)
        for m in range(shape.micro_batches)
        if shape.group_of(stage, m) == group
        for kind in kinds
    ]
    rank = {kind: place for place, kind in enumerate(kinds)}
    return [Order(order) for order in permutations(actions) if sorted_by_kind(order, rank)]


def sorted_by_kind(order: tuple[Action, ...], rank: dict[str, int]) -> bool:
    come: dict[tuple[int, int], int] = {}
    for action in order:
        cell = (action.stage, action.micro_batch)
        if come.get(cell, 0) != rank[action.kind]:
            return False
        come[cell] = rank[action.kind] + 1
    return True


def keeps_limits(schedule: Schedule, shape: PipelineShape) -> bool:
    in_flight = in_flight_peaks(schedule, shape)
    if any(peak > shape.limit(stage) for stage, peak in enumerate(in_flight)):
        return False
    peaks = memory_peaks_bytes(schedule, shape)
    return not shape.memory_bytes or all(
        peak <= room for peak, room in zip(peaks, shape.memory_bytes, strict=True)
    )
