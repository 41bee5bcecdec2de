"""Cut a batch into micro-batches, and each micro-batch over the replicas of every stage."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.plan.row_split import row_ranges, split_rows
from penstock.schedule.action import KIND_CODES, Action
from penstock.schedule.concurrent_clock import one_at_a_time
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import validate
from penstock.schedule.weight_rule import SYNCHRONOUS


@dataclass(frozen=True)
class BatchCut:
    """The rows of a batch, cut into micro-batches and slices.

    ``micro_batches[m]`` are the rows of micro-batch ``m`` in the batch. ``slices[m][stage]`` are
    the numbers of these rows that each replica of the stage computes (0: none).
    """

    micro_batches: tuple[range, ...]
    slices: tuple[tuple[tuple[int, ...], ...], ...]

    def rows(self, micro_batch: int, stage: int, replica: int) -> range:
        """The rows of the batch that one replica computes of one micro-batch."""
        start = self.micro_batches[micro_batch].start
        own = row_ranges(self.slices[micro_batch][stage])[replica]
        return range(start + own.start, start + own.stop)


def cut_batch(plan: Plan, rows: int) -> BatchCut:
    """Cut ``rows`` samples as planned, or as evenly as possible if the batch has another size.

    >>> from penstock.plan.plan import Stage
    >>> plan = Plan((Stage(range(1), (0, 1), (1, 1)),), 4, 2, "gpipe")
    >>> [list(rows) for rows in cut_batch(plan, 7).micro_batches]
    [[0, 1], [2, 3], [4, 5], [6]]
    >>> cut_batch(plan, 7).slices[3]
    ((1, 0),)
    >>> turns = Plan((Stage(range(1), (0, 1), (2, 2), in_turn=True),), 3, 2, "gpipe")
    >>> cut_batch(turns, 6).slices
    (((2, 0),), ((0, 2),), ((2, 0),))
    """
    if rows == plan.global_batch:
        counts = (plan.micro_batch_size,) * plan.micro_batches
    else:
        counts = split_rows(rows, (1,) * min(plan.micro_batches, rows))
    bounds = accumulate(counts, initial=0)
    return BatchCut(
        tuple(range(lo, hi) for lo, hi in pairwise(bounds)),
        tuple(
            tuple(slices_of(plan.holder(s, m), plan, m, count) for s in range(len(plan.stages)))
            for m, count in enumerate(counts)
        ),
    )


def slices_of(stage: Stage, plan: Plan, micro_batch: int, rows: int) -> tuple[int, ...]:
    """The rows of a micro-batch that each device of a stage computes; 0: none."""
    if stage.in_turn:
        turn = micro_batch % stage.replicas
        return tuple(rows if replica == turn else 0 for replica in range(stage.replicas))
    return stage.slices if rows == plan.micro_batch_size else split_rows(rows, stage.slices)


@lru_cache(maxsize=8)
def runnable_schedule(plan: Plan, micro_batches: int) -> tuple[Schedule, PipelineShape]:
    """The plan's schedule for ``micro_batches`` micro-batches, which can be run, and its shape.

    With fewer micro-batches than planned, the plan's own order is used without the missing ones, so
    that a schedule found by search is searched only once. A rank does one thing at a time, so the
    two streams of a concurrent schedule are merged into one order
    (`penstock.schedule.concurrent_clock`). The result depends only on the plan, so all ranks agree.
    """
    resized = replace(plan, micro_batches=micro_batches)
    shape = resized.shape()
    if micro_batches < plan.micro_batches:
        whole, _ = runnable_schedule(plan, plan.micro_batches)
        if whole.weights == SYNCHRONOUS:
            schedule = with_fewer_micro_batches(whole, shape)
            validate(schedule, shape)
            return schedule, shape
    schedule = order_of(resized)
    if schedule.concurrent:
        schedule = one_at_a_time(schedule, shape)
        validate(schedule, shape)
    return schedule, shape


def check_runnable(plan: Plan) -> None:
    """Raise `BadInput` if the plan's schedule is unknown or cannot be run."""
    runnable_schedule(plan, plan.micro_batches)


def forward_schedule(shape: PipelineShape) -> Schedule:
    """Forwards only, for an evaluation.

    >>> print(forward_schedule(PipelineShape(stages=2, micro_batches=3)))
    stage 0   F0 F1 F2
    stage 1   F0 F1 F2

    A group with several stages runs as many micro-batches through one stage as there are groups
    before it continues with the next stage. So no group waits once the pipeline is full:

    >>> print(forward_schedule(PipelineShape(stages=4, micro_batches=3, placement=(0, 1, 0, 1))))
    stage 0,2 0F0 0F1 2F0 2F1 0F2 2F2
    stage 1,3 1F0 1F1 3F0 3F1 1F2 3F2
    """
    orders: list[list[Action]] = [[] for _ in range(shape.groups)]
    for first in range(0, shape.micro_batches, shape.groups):
        for stage in range(shape.stages):
            for micro_batch in range(first, min(first + shape.groups, shape.micro_batches)):
                orders[shape.group_of(stage, micro_batch)].append(Action("F", stage, micro_batch))
    return schedule_from_actions(orders)


RECOMPUTE = KIND_CODES["R"]


def with_fewer_micro_batches(schedule: Schedule, shape: PipelineShape) -> Schedule:
    """``schedule`` without the micro-batches beyond those of ``shape``.

    The remaining actions keep their order. So the result cannot deadlock, messages keep their
    order, and no group holds more than before.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> whole = one_f_one_b(PipelineShape(stages=3, micro_batches=8))
    >>> print(with_fewer_micro_batches(whole, PipelineShape(stages=3, micro_batches=4)))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3
    """
    orders: list[Order] = []
    for order in schedule.orders:
        # R is inserted again: a backward may now directly follow its own forward.
        left = (order.micro_batches < shape.micro_batches) & (order.kinds != RECOMPUTE)
        kept = order_from_arrays(order.kinds[left], order.stages[left], order.micro_batches[left])
        orders.append(with_recomputes(kept, shape))
    return replace(schedule, orders=tuple(orders))
