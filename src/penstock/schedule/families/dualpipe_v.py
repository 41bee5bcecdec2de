"""DualPipeV: DualPipe cut in half, on a pipeline that goes down the groups and back up."""

import numpy as np

from penstock.errors import BadInput
from penstock.schedule.families.dualpipe import order_of_existing, order_of_steps
from penstock.schedule.family import Family
from penstock.schedule.fitting import checked_fit, rounds_of
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = ["DUALPIPE_V", "dualpipe_v"]


def dualpipe_v(shape: PipelineShape) -> Schedule:
    """DualPipe's steps on two stages a group, in one direction (DeepSeek's DualPipe code).

    >>> from penstock.schedule.placement import folded
    >>> print(dualpipe_v(PipelineShape(stages=4, micro_batches=4, placement=folded(2, 2))))
    stage 0,3 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    stage 1,2 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    Each group holds the stages that DualPipe gives to a pair of groups, so no stage is held twice.
    The steps are in `dualpipe.order_of_steps`; the near chunk is the stage on the way down. The
    published bubble is ``(p - 1) (F&B + B - 3 W)`` for ``p`` groups and at least ``2 p``
    micro-batches, with F, B and W of one stage. As in DualPipe, ``F&B`` is a forward, then a
    backward here, and the same order idles for ``(p - 1) (F + B - 2 W)``. A group holds
    ``2 p + 1`` micro-batches of one stage.

    Fewer micro-batches run as the first ones of ``2 p``.

    Raises:
        BadInput: the placement is not folded with two stages a group, or a limit cannot be kept.
    """
    rounds = rounds_of(shape, "folded", "dualpipe-v")
    if rounds != 2:
        raise BadInput(
            f"schedule 'dualpipe-v' with {rounds} stages on each device group; place two on each, "
            f"down and up again"
        )
    orders: list[Order] = []
    for rank in range(shape.groups):
        kinds, far, numbers = order_of_steps(rank, shape.groups, shape.micro_batches)
        stages = np.where(far, shape.stages - 1 - rank, rank)
        orders.append(order_of_existing(shape, kinds, stages, numbers))
    return checked_fit(Schedule(tuple(orders)), shape, "dualpipe-v")


DUALPIPE_V = Family(dualpipe_v, "folded", rounds=2, splits=True)
