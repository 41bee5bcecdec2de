"""The channels between stages: blocking, first in first out."""

import numpy as np
import numpy.typing as npt

from penstock.errors import BadInput
from penstock.schedule.action import ACTION_KINDS
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = ["check_channels"]

FORWARDS = np.array([kind == "F" for kind in ACTION_KINDS])
GRADIENTS = np.array([kind in ("B", "I") for kind in ACTION_KINDS])
"""By kind code: whether such an action sends activations, and whether it sends gradients."""


def check_channels(schedule: Schedule, shape: PipelineShape) -> None:
    """Raise unless every stage receives messages in the order in which its neighbour sends them.

    Two neighbouring stages share one channel for activations and one for gradients (two of each
    on a mirrored pipeline). A channel delivers in order, so a receiver that waits for a message
    other than the next one deadlocks.

    Raises:
        BadInput: two messages overtake one another; names the first pair.
    """
    directions = (0, 1) if shape.mirrored else (0,)
    for direction in directions:
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
