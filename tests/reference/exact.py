"""The fastest schedule, found and proven by a constraint solver, for small pipelines.

An oracle: families are compared with it here and in `benchmarks/optimality`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from reference.exact_model import solve
from reference.exact_rounding import rounded_shape

from penstock.errors import BadInput
from penstock.schedule import registry
from penstock.schedule.action import Action
from penstock.schedule.bound import makespan_bound_s
from penstock.schedule.clock import makespan_s, times_of
from penstock.schedule.order import Order
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import validate
from penstock.schedule.weight_rule import SYNCHRONOUS

__all__ = ["ExactAnswer", "exact", "find_exact"]

WORK_LIMIT = 2.0
"""How long `exact` searches, in the solver's deterministic time: some seconds up to 15."""

MOST_ACTIONS = 5_000
"""Larger pipelines are not searched: the solver would make no progress."""

PROVEN = 1e-5
"""A makespan within this fraction of its bound counts as optimal."""


@dataclass(frozen=True)
class ExactAnswer:
    """The best schedule found, its makespan, and a lower bound on all makespans, in seconds."""

    schedule: Schedule
    makespan_s: float
    bound_s: float

    @property
    def optimal(self) -> bool:
        """Whether makespan and bound are equal up to rounding (`PROVEN`)."""
        return self.makespan_s <= self.bound_s * (1 + PROVEN)


def exact(shape: PipelineShape) -> Schedule:
    """A schedule of least makespan, with split backwards, for any placement, costs and memory.

    >>> print(exact(PipelineShape(stages=2, micro_batches=2)))
    stage 0   F0 F1 I0 W0 I1 W1
    stage 1   F0 I0 F1 I1 W0 W1

    The result is deterministic. For pipelines beyond about four groups and eight micro-batches
    (with tight memory; more without) the search ends before the proof. `find_exact` also returns
    the bound, and takes other time limits.

    Raises:
        BadInput: one micro-batch alone does not fit in memory.
    """
    return find_exact(shape, work_limit=WORK_LIMIT).schedule


def find_exact(
    shape: PipelineShape,
    *,
    split: bool = True,
    time_limit_s: float = inf,
    work_limit: float = inf,
) -> ExactAnswer:
    """The schedule of least makespan by `penstock.schedule.clock`, or the best until a limit.

    With ``split`` all backwards are split, which is at least as fast as any mixture with whole
    ones; without, all are whole. The problem is a constraint program (OR-Tools' CP-SAT, one thread,
    fixed seed). The search starts from the best valid schedule of the other families, so the result
    is never slower. Zero Bubble (Qi et al., ICLR 2024) does the same with an integer program for
    the straight placement.

    Micro-batches keep their order on every stage; `penstock.schedule.bound` proves that this loses
    nothing. With recomputation the proof does not hold, since a backward right after its own
    forward needs no R. Then the result and its bound are for schedules that keep the order, with
    R right before its backward.

    The solver works on integers (`exact_rounding`). Times of at most seven digits are exact. Others
    are rounded down, so that ``bound_s`` holds for the true times; ``makespan_s`` uses the true
    times. Bytes are exact or rounded up, so that the schedule fits; if they are rounded,
    ``bound_s`` is for the rounded ones.

    The search stops after ``time_limit_s`` seconds, or after ``work_limit`` units of the solver's
    deterministic time (some seconds each). With the latter alone the result is deterministic.

    >>> answer = find_exact(PipelineShape(stages=3, micro_batches=4), split=False)
    >>> answer.makespan_s, answer.bound_s, answer.optimal
    (18.0, 18.0, True)

    Raises:
        BadInput: one micro-batch alone does not fit in memory.
    """
    bound_s = makespan_bound_s(shape, split=split)
    rounded = rounded_shape(shape)
    whole = rounded.shape
    least = ceil(makespan_bound_s(whole, split=split) - 1e-6)
    known = best_known(shape, whole, split=split, least=least)
    longest = round(makespan_s(known, whole))
    schedule, bound = known, least
    if longest > least and known.actions <= MOST_ACTIONS:
        found = solve(
            whole,
            split=split,
            known=starts_of(known, whole),
            longest=longest,
            least=least,
            time_limit_s=time_limit_s,
            work_limit=work_limit,
        )
        bound = found.bound
        schedule = schedule_of(found.start, whole)
    validate(schedule, shape)
    taken_s = makespan_s(schedule, shape)
    return ExactAnswer(schedule, taken_s, min(taken_s, max(bound_s, rounded.seconds(bound))))


def best_known(shape: PipelineShape, whole: PipelineShape, *, split: bool, least: int) -> Schedule:
    """The fastest schedule of the other families; stops at one that reaches ``least``.

    Raises:
        BadInput: none fits in memory.
    """
    best, best_taken = None, inf
    for schedule in known_schedules(shape, whole, split=split):
        taken = makespan_s(schedule, whole)
        if taken < best_taken:
            best, best_taken = schedule, taken
        if best_taken <= least:
            break
    if best is None:
        raise BadInput(
            "not even one micro-batch after another fits into memory_bytes "
            f"{list(shape.memory_bytes)}; use smaller micro-batches, recompute, or more stages"
        )
    return best


def known_schedules(
    shape: PipelineShape, whole: PipelineShape, *, split: bool
) -> Iterator[Schedule]:
    """The schedules of `one_by_one` and of the other families that are valid for ``whole``."""
    for make in (one_by_one, *(family.make for family in registry.FAMILIES.values())):
        try:
            made = make(shape)
            if made.concurrent or made.weights != SYNCHRONOUS:
                continue
            schedule = in_order(made, whole, split=split)
            validate(schedule, whole)
        except BadInput:
            continue
        if split or all(action.kind != "I" for order in schedule.orders for action in order):
            yield schedule


def one_by_one(shape: PipelineShape) -> Schedule:
    """Each micro-batch starts when the previous one has ended: the schedule that needs least
    memory.

    >>> print(one_by_one(PipelineShape(stages=2, micro_batches=2)))
    stage 0   F0 B0 F1 B1
    stage 1   F0 B0 F1 B1
    """
    orders: list[list[Action]] = [[] for _ in range(shape.groups)]
    for m in range(shape.micro_batches):
        for stage in range(shape.stages):
            orders[shape.group_of(stage, m)].append(Action("F", stage, m))
        for stage in reversed(range(shape.stages)):
            orders[shape.group_of(stage, m)].append(Action("B", stage, m))
    return schedule_from_actions(orders)


def in_order(schedule: Schedule, shape: PipelineShape, *, split: bool) -> Schedule:
    """The same schedule with micro-batches in order on every stage, and backwards split if asked.

    >>> from penstock.schedule.schedule import parse_schedule
    >>> schedule = parse_schedule("stage 0  F1 F0 B0 B1")
    >>> print(in_order(schedule, PipelineShape(stages=1, micro_batches=2), split=True))
    stage 0   F0 F1 I0 W0 I1 W1
    """
    step = 2 if shape.mirrored else 1
    orders: list[Order] = []
    for order in schedule.orders:
        come: dict[Action, int] = {}
        actions: list[Action] = []
        for action in order:
            for kind in ("I", "W") if action.kind == "B" and split else (action.kind,):
                first = Action(kind, action.stage, action.micro_batch % step)
                if kind != "R":
                    m = come.get(first, first.micro_batch)
                    come[first] = m + step
                    actions.append(Action(kind, action.stage, m))
        orders.append(with_recomputes(Order(actions), shape))
    return Schedule(tuple(orders))


def starts_of(schedule: Schedule, whole: PipelineShape) -> dict[Action, int]:
    """The start of every action, in the units of an integer shape."""
    times = times_of(schedule, whole)
    return {
        action: round(start)
        for order, starts in zip(schedule.orders, times.start_s, strict=True)
        for action, start in zip(order, starts.tolist(), strict=True)
    }


def schedule_of(start: dict[Action, int], shape: PipelineShape) -> Schedule:
    """The actions sorted by start, with R right before each backward that needs it."""
    orders: list[list[Action]] = [[] for _ in range(shape.groups)]
    for action in sorted(start, key=lambda action: start[action]):
        if action.kind != "R":
            orders[shape.group_of(action.stage, action.micro_batch)].append(action)
    return Schedule(tuple(with_recomputes(Order(actions), shape) for actions in orders))
