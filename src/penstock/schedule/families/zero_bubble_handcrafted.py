"""The handcrafted schedules of Zero Bubble: 1F1B with split backwards, whose W fill the gaps.

Both raise `BadInput` where a group does not hold one stage, or has no room for one micro-batch.
"""

import numpy as np

from penstock.schedule.families.zero_bubble_order import Pattern, schedule_of_pattern
from penstock.schedule.family import Family
from penstock.schedule.fitting import stages_per_group
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.warm_up import warm_up_depths


def zb_h1(shape: PipelineShape) -> Schedule:
    """1F1B's warm-up depth, with W in the gaps (Zero Bubble, ICLR 2024, ZB-H1).

    >>> print(zb_h1(PipelineShape(stages=3, micro_batches=4)))
    stage 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1   F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    With ``p`` stages, stage ``s`` warms up with ``p - s`` forwards. No stage holds more than ``p``
    micro-batches until their W, as many as stage 0 of 1F1B. With ``F = I = W``, free transfers and
    ``M >= p`` a stage idles for ``(p - 1) (F + I - W)`` of the iteration, a third of 1F1B's bubble.
    The iteration takes ``M (F + I + W) + (p - 1) F``, or ``M (I + W) + (2 p - 1) F`` if ``M < p``.
    No order with one stage a group is faster.

    The order of F and I does not depend on the costs; W run where the costs leave gaps. Limits make
    the warm-up shallower.
    """
    return handcrafted(shape, "zb-h1", slope=1)


def zb_h2(shape: PipelineShape) -> Schedule:
    """A warm-up so deep that no stage waits after its first forward (Zero Bubble, ZB-H2).

    >>> print(zb_h2(PipelineShape(stages=3, micro_batches=6)))
    stage 0   F0 F1 F2 F3 F4 I0 W0 F5 I1 I2 W1 W2 I3 I4 W3 W4 I5 W5
    stage 1   F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 I4 W1 W2 I5 W3 W4 W5
    stage 2   F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    With ``p`` stages, stage ``s`` warms up with ``2 (p - s) - 1`` forwards and holds at most
    ``2 p - 1`` micro-batches until their W. With ``F = I = W``, free transfers and ``M >= 2 p - 1``
    a stage idles for ``(p - 1) (F + I - 2 W)``, which is zero, between its first start and its last
    end. Stages start and end one after the other, so an iteration takes as long as with `zb_h1`.
    """
    return handcrafted(shape, "zb-h2", slope=2)


def handcrafted(shape: PipelineShape, name: str, slope: int) -> Schedule:
    """1F1B in which each stage has ``slope`` micro-batches more in flight than the next."""
    stages_per_group(shape, "straight", name)
    m = np.arange(shape.micro_batches)
    depths = warm_up_depths(shape, lambda from_here, batches: slope * (from_here - 1) + 1)
    d = np.array(depths)[:, np.newaxis]
    forwards = np.where(m < d, m, 2 * m - d + 1)
    backwards = 2 * m + d
    most = slope * (shape.stages - 1) + 1
    return schedule_of_pattern(shape, Pattern(np.array([forwards, backwards]), most))


ZB_H1 = Family(zb_h1, splits=True)
ZB_H2 = Family(zb_h2, splits=True)
