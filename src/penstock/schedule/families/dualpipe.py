"""DualPipe: micro-batches run in both directions, and forwards and backwards meet in pairs."""

import numpy as np
import numpy.typing as npt

from penstock.errors import BadInput
from penstock.schedule.action import KIND_CODES
from penstock.schedule.family import Family
from penstock.schedule.fitting import first_that_fits, stages_per_group
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

F, B, I, W = (KIND_CODES[kind] for kind in ("F", "B", "I", "W"))  # noqa: E741


def dualpipe(shape: PipelineShape) -> Schedule:
    """Eight steps on every group, for a near and a far chunk (DeepSeek-V3, section 3.2.1).

    >>> print(dualpipe(PipelineShape(stages=2, micro_batches=4, mirrored=True)))
    stage 0,1 0F0 1F1 0F2 1B1 1F3 0B0 1B3 0I2 0W2
    stage 0,1 0F1 1F0 0F3 1B0 1F2 0B1 1B2 0I3 0W3

    The steps are those of the authors' released code; see `order_of_steps`. Where it runs a forward
    and a backward at once, ``F&B``, here the backward follows the forward. ``F&B`` gains by hiding
    the messages of one behind the work of the other, and in Penstock messages never block a group's
    work.

    The published bubble is ``(p / 2 - 1) (F&B + B - 3 W)`` for ``p`` groups (even) and an even
    number of at least ``2 p`` micro-batches. There the results of both halves of ``F&B`` are ready
    when both have ended. Here a result is sent when its half has ended and ``F&B = F + B``, so the
    same order idles for ``(p / 2 - 1) (F + B - 2 W)`` if ``W <= F``. A group holds ``p + 1``
    micro-batches of one stage.

    Fewer micro-batches, or an odd number, run in the schedule of the next published number, without
    the actions of micro-batches that do not exist. For odd ``p`` the group in the middle plays the
    innermost rank of both directions.
    """
    stages_per_group(shape, "mirrored", "dualpipe")
    return in_steps(shape, "dualpipe")


def in_steps(shape: PipelineShape, name: str) -> Schedule:
    """The orders of `order_of_steps` for all groups; those of a mirrored pipeline are in pairs."""
    ways = 2 if shape.mirrored else 1
    ranks = -(-shape.groups // ways)
    orders: list[Order] = []
    for group in range(shape.groups):
        rank = min(group, shape.groups - 1 - group) if shape.mirrored else group
        kinds, far, numbers = order_of_steps(rank, ranks, -(-shape.micro_batches // ways))
        stages = np.where(far, shape.stages - 1 - rank, rank)
        micro_batches = ways * numbers
        if shape.mirrored:
            # Odd micro-batches enter at the last group.
            micro_batches += far ^ int(group >= ranks)
        exists = micro_batches < shape.micro_batches
        order = order_from_arrays(kinds[exists], stages[exists], micro_batches[exists])
        orders.append(with_recomputes(order, shape))
    return first_that_fits(name, shape, [Schedule(tuple(orders))])


def order_of_steps(
    rank: int, ranks: int, micro_batches: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Kinds, chunks and micro-batch numbers of a rank's actions; numbers count in each chunk.

    Chunk 0 is the near one, which micro-batches reach first; chunk 1 is the far one. ``ranks``
    share ``micro_batches`` per chunk; fewer than two a rank are rounded up to that. W is the
    oldest weight backward that is left. The steps are

        1   F0                  2 (ranks - rank - 1) times
        2   F0 F1               rank + 1
        3   I1 W F1             ranks - rank - 1
        4   F0 B1 F1 B0         micro_batches - 2 ranks + rank + 1
        5   B1 F1 B0            ranks - rank - 1
        6   B1 B0               rank + 1; the later half of them I1 and I0
        7   W I0                ranks - rank - 1
        8   W                   rank + 1

    (DeepSeek's DualPipe code.)
    """
    before, after = rank + 1, ranks - rank - 1
    steady = max(micro_batches, 2 * ranks) - 2 * ranks + before
    kinds_of = [
        ([F], [0], 2 * after),
        ([F, F], [0, 1], before),
        ([I, W, F], [1, 0, 1], after),
        ([F, B, F, B], [0, 1, 1, 0], steady),
        ([B, F, B], [1, 1, 0], after),
        ([B, B], [1, 0], before),
        ([W, I], [0, 0], after),
        ([W], [0], before),
    ]
    kinds = np.concatenate([np.tile(np.array(words), times) for words, _, times in kinds_of])
    chunks = np.concatenate([np.tile(np.array(which), times) for _, which, times in kinds_of])
    ends = np.cumsum([len(words) * times for words, _, times in kinds_of]).tolist()
    kinds[ends[5] - before : ends[5]] = I
    numbers = np.zeros_like(kinds)
    for chunk in (0, 1):
        for mine in (kinds == F, (kinds == B) | (kinds == I)):
            mine &= chunks == chunk
            numbers[mine] = np.arange(np.count_nonzero(mine))
    for values in (chunks, numbers):
        values[kinds == W] = values[kinds == I]
    return kinds, chunks, numbers


DUALPIPE = Family(dualpipe, "mirrored", splits=True)


def dualpipe_v(shape: PipelineShape) -> Schedule:
    """DualPipe's steps on two stages a group, in one direction (DeepSeek's DualPipe code).

    >>> from penstock.schedule.shape import folded
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
    """
    rounds = stages_per_group(shape, "folded", "dualpipe-v")
    if rounds != 2:
        raise BadInput(
            f"schedule 'dualpipe-v' with {rounds} stages on each device group; place two on each, "
            f"down and up again"
        )
    return in_steps(shape, "dualpipe-v")


DUALPIPE_V = Family(dualpipe_v, "folded", rounds=2, splits=True)
