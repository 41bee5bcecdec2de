"""The orders of a schedule as flat arrays, made without actions where that is proven to be safe.

The orders of the early-backward family are valid by construction: their depths never grow
downstream and respect every limit (a property test holds them to `penstock.schedule.validate`).
So they are written down at once; those of all other schedules are made and validated first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.schedule.early_backward import IN_FLIGHT, warm_up_depths
from penstock.schedule.schedule import Schedule
from penstock.simulate.layout import KIND_CODES
from penstock.simulate.memory import held_while
from penstock.simulate.stage_memory import Held

__all__ = ["FlatOrders", "flat_orders", "flatten", "orders_of_plan"]

Whole: TypeAlias = npt.NDArray[np.int64]

FORWARD, BACKWARD, RECOMPUTE = KIND_CODES["F"], KIND_CODES["B"], KIND_CODES["R"]
GRADIENTS = (KIND_CODES["B"], KIND_CODES["W"])


@dataclass(frozen=True, slots=True)
class FlatOrders:
    """Kind and micro-batch of every action, stage after stage; where each stage starts.

    ``last_backward[stage]`` is the index, in the stage's order, of its last action that makes
    gradients. ``held[stage]`` is what the stage holds while it works; what is less than another in
    every respect may be left out.
    """

    start: Whole
    kind: Whole
    micro: Whole
    last_backward: Whole
    held: tuple[tuple[Held, ...], ...]

    @property
    def splits(self) -> tuple[bool, ...]:
        """For each stage whether its backwards are split, so that W makes the gradients."""
        kinds = self.kind[self.start[:-1] + self.last_backward]
        return tuple((kinds == KIND_CODES["W"]).tolist())


def orders_of_plan(plan: Plan) -> FlatOrders:
    """The orders of ``plan``, valid.

    Raises:
        BadInput: as `order_of`.
    """
    in_flight = IN_FLIGHT.get(plan.schedule)
    if in_flight is None or (plan.schedule == "gpipe" and plan.in_flight_limit):
        schedule = order_of(plan)
        return flatten(schedule, held_while(schedule, len(plan.stages)))
    depths = warm_up_depths(plan.shape(), in_flight)
    return joined(
        [
            early_backward_order(plan.micro_batches, depth, stage.recompute)
            for stage, depth in zip(plan.stages, depths, strict=True)
        ]
    )


def flat_orders(schedule: Schedule) -> FlatOrders:
    """Flatten the orders of ``schedule``, where no memory is asked for."""
    return flatten(schedule, ((),) * len(schedule.orders))


def flatten(schedule: Schedule, held: tuple[tuple[Held, ...], ...]) -> FlatOrders:
    """Flatten the orders of a schedule that holds ``held``."""
    orders: list[StageOrder] = []
    for order, held_by_stage in zip(schedule.orders, held, strict=True):
        kind = np.array([KIND_CODES[action.kind] for action in order], dtype=np.int64)
        micro = np.array([action.micro_batch for action in order], dtype=np.int64)
        last_backward = int(np.flatnonzero(np.isin(kind, GRADIENTS))[-1])
        orders.append(StageOrder(kind, micro, last_backward, held_by_stage))
    return joined(orders)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """The order of one stage, as in `FlatOrders`."""

    kind: Whole
    micro: Whole
    last_backward: int
    held: tuple[Held, ...]


def joined(orders: Sequence[StageOrder]) -> FlatOrders:
    """The orders of all stages, one after the other."""
    return FlatOrders(
        np.array(list(accumulate((len(order.kind) for order in orders), initial=0))),
        np.concatenate([order.kind for order in orders]),
        np.concatenate([order.micro for order in orders]),
        np.array([order.last_backward for order in orders]),
        tuple(order.held for order in orders),
    )


@lru_cache(maxsize=256)
def early_backward_order(micro_batches: int, depth: int, recompute: bool) -> StageOrder:
    """`penstock.schedule.early_backward.order_of_stage`, as arrays.

        F(0) .. F(K-1)   [R(0)] B(0) F(K)   [R(1)] B(1) F(K+1)  ..  [R(M-1)] B(M-1)

    A stage one deep runs each backward right after its forward and never again.
    """
    again = recompute and depth > 1
    cycle = [RECOMPUTE, BACKWARD, FORWARD] if again else [BACKWARD, FORWARD]
    kind = np.concatenate([np.full(depth, FORWARD), np.tile(cycle, micro_batches)])
    micro = np.concatenate(
        [np.arange(depth), np.repeat(np.arange(micro_batches), len(cycle))], dtype=np.int64
    )
    micro[depth:][kind[depth:] == FORWARD] += depth
    kept = micro < micro_batches
    held = (Held(0, depth), Held(1, depth - 1)) if again else (Held(depth, 0),)
    kind, micro = kind[kept].astype(np.int64), micro[kept]
    return StageOrder(kind, micro, len(kind) - 1, held)
