"""The quickest order of all: found and proven by a constraint solver, for small pipelines."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from penstock.errors import BadInput
from penstock.schedule.action import Action
from penstock.schedule.bound import makespan_bound_s
from penstock.schedule.clock import makespan_s, times_of
from penstock.schedule.family import Family
from penstock.schedule.order import Order
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.searched.exact_model import solve
from penstock.schedule.searched.exact_rounding import rounded_shape
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import validate
from penstock.schedule.weight_rule import SYNCHRONOUS

__all__ = ["EXACT", "ExactAnswer", "exact", "find_exact"]

WORK_LIMIT = 2.0
"""How much `exact` searches, in the solver's count: some seconds to a quarter of a minute."""

MOST_ACTIONS = 5_000
"""Pipelines with more actions are not searched: the solver would not get anywhere."""

PROVEN = 1e-5
"""A makespan so little above its bound, relatively, counts as optimal."""


@dataclass(frozen=True)
class ExactAnswer:
    """The best schedule found, its makespan, and a makespan that no schedule falls below."""

    schedule: Schedule
    makespan_s: float
    bound_s: float

    @property
    def optimal(self) -> bool:
        """Whether makespan and bound are the same up to `PROVEN`, which is rounding."""
        return self.makespan_s <= self.bound_s * (1 + PROVEN)


def exact(shape: PipelineShape) -> Schedule:
    """An order of least makespan, with split backwards, for any placement, costs and memory.

    >>> print(exact(PipelineShape(stages=2, micro_batches=2)))
    stage 0   F0 F1 I0 W0 I1 W1
    stage 1   F0 I0 F1 I1 W0 W1

    The same schedule comes out every time. Beyond small pipelines (about four groups and eight
    micro-batches with tight memory, more without) the search ends before the proof; `find_exact`
    gives the bound, and takes other limits.

    Raises:
        BadInput: the solver is not installed, or one micro-batch alone does not fit.
    """
    return find_exact(shape, work_limit=WORK_LIMIT).schedule


def find_exact(
    shape: PipelineShape,
    *,
    split: bool = True,
    time_limit_s: float = inf,
    work_limit: float = inf,
) -> ExactAnswer:
    """The schedule of least makespan by the clock of `penstock.schedule.clock`, or the best so far.

    With ``split`` every backward is in two halves, which is at least as quick as any mixture with
    whole ones; without, all are whole. A constraint program (OR-Tools' CP-SAT, one thread, fixed
    seed) is warm-started with the best other family of the registry that is valid for ``shape``,
    so the answer is never worse than those. Zero Bubble (Qi et al., ICLR 2024) does the same by an
    integer program for the straight placement.

    Micro-batches keep their order on every stage; `penstock.schedule.bound` proves that nothing is
    lost. With recompute that proof does not hold, since R is spared where a backward follows its
    own forward: then the answer and its bound are for schedules that keep this order, and have R
    right before its backward.

    The solver counts in whole numbers (`exact_rounding`): times of at most seven
    digits are exact, others are rounded down, so that ``bound_s`` holds for the true ones, which
    also ``makespan_s`` is played with. Bytes are exact or rounded up, so that the schedule fits;
    where they are not exact, ``bound_s`` is for the rounded ones.

    The search ends early after ``time_limit_s``, or after ``work_limit`` of the solver's own count
    of its work (some seconds each): with the latter alone the answer is always the same.

    >>> answer = find_exact(PipelineShape(stages=3, micro_batches=4), split=False)
    >>> answer.makespan_s, answer.bound_s, answer.optimal
    (18.0, 18.0, True)

    Raises:
        BadInput: the solver is not installed, or one micro-batch alone does not fit.
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
    """The quickest of the other families, or the first that none can be quicker than.

    Raises:
        BadInput: none fits.
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
    """Valid schedules for the whole-number shape: the other families', and one by one."""
    # The registry imports this module.
    from penstock.schedule.registry import FAMILIES

    for make in (one_by_one, *(family.make for family in FAMILIES.values())):
        if make is exact:
            continue
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
    """A micro-batch starts when the one before is done: if anything fits, this does.

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
    """The same schedule with micro-batches in order on every stage, backwards split if asked.

    >>> from penstock.schedule.text import parse_schedule
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
    """When each action starts, in the units of a whole-number shape."""
    times = times_of(schedule, whole)
    return {
        action: round(start)
        for order, starts in zip(schedule.orders, times.start_s, strict=True)
        for action, start in zip(order, starts.tolist(), strict=True)
    }


def schedule_of(start: dict[Action, int], shape: PipelineShape) -> Schedule:
    """Actions by their starts, with recomputes right before the backwards that need them."""
    orders: list[list[Action]] = [[] for _ in range(shape.groups)]
    for action in sorted(start, key=lambda action: start[action]):
        if action.kind != "R":
            orders[shape.group_of(action.stage, action.micro_batch)].append(action)
    return Schedule(tuple(with_recomputes(Order(actions), shape) for actions in orders))


EXACT = Family(exact, splits=True, proves=True, stand_ins={"straight": "zb-h1", "folded": "zb-v"})
