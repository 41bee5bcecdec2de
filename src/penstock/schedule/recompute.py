"""Inserts recomputation (R) for stages that keep only their inputs."""

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import KIND_CODES
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.shape import PipelineShape

FORWARD, RECOMPUTE = KIND_CODES["F"], KIND_CODES["R"]
BACKWARD, INPUTS = KIND_CODES["B"], KIND_CODES["I"]


def with_recomputes(order: Order, shape: PipelineShape) -> Order:
    """``order`` with R before every B or I that needs one, unless its forward has just ended.

    >>> from penstock.schedule.action import parse_action
    >>> order = Order(parse_action(text) for text in "0F0 0F1 0B0 0B1".split())
    >>> shape = PipelineShape(stages=1, micro_batches=2, recompute=(True,))
    >>> " ".join(map(str, with_recomputes(order, shape)))
    '0F0 0F1 0R0 0B0 0R1 0B1'
    """
    if not any(shape.recompute):
        return order
    needed = np.flatnonzero(needs_recompute(order, shape))
    kinds = np.insert(order.kinds, needed, RECOMPUTE)
    stages = np.insert(order.stages, needed, order.stages[needed])
    micro_batches = np.insert(order.micro_batches, needed, order.micro_batches[needed])
    return order_from_arrays(kinds, stages, micro_batches)


def needs_recompute(order: Order, shape: PipelineShape) -> npt.NDArray[np.bool_]:
    """A mask of the actions of an order without R that need an R before them."""
    recompute = np.array(shape.recompute or (False,) * shape.stages)
    backward = (order.kinds == BACKWARD) | (order.kinds == INPUTS)
    just_ran = np.zeros(len(order), dtype=np.bool_)
    just_ran[1:] = (
        (order.kinds[:-1] == FORWARD)
        & (order.stages[:-1] == order.stages[1:])
        & (order.micro_batches[:-1] == order.micro_batches[1:])
    )
    return backward & recompute[order.stages] & ~just_ran
