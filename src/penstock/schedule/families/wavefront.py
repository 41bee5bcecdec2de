"""A list order that has the bound of SPP."""

from penstock.schedule.families.early_backward import early_backward
from penstock.schedule.family import Family
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape


def wavefront(shape: PipelineShape) -> Schedule:
    """Each stage's actions sorted by micro-batch plus position (SPP, INFOCOM 2022, procedure PE).

    A micro-batch passes positions 0 to ``4 S - 4``: forward on stage 0, channel, forward on stage
    1, and so on; forward and backward of the last stage share a position; then the way back. So
    stage ``s`` runs its forward at position ``2 s`` and its backward at ``4 (S - 1) - 2 s``.
    Actions run in the order of ``micro-batch + position``; of equal ones the older micro-batch goes
    first.

    >>> print(wavefront(PipelineShape(stages=3, micro_batches=6)))
    stage 0   F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
    stage 1   F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    This is the early-backward order with depths `wavefront_depth`: ``B(0)`` and
    ``F(4 (S - 1 - s))`` have the same sum on stage ``s``, and the older goes first. Limits cap the
    depths as in the rest of that family.

    The authors have not published which list they use. This one attains their bound
    ``(1 + (4 S - 4)/M) C + max R``: among actions of equal sum a resource serves at most one
    micro-batch forward and one backward, and the largest sum is ``M + 4 S - 4``.
    """
    return early_backward(shape, wavefront_depth)


def wavefront_depth(from_here: int, micro_batches: int) -> int:
    """Micro-batches in flight on a stage, given the number of stages from it to the last one.

    >>> [wavefront_depth(stages, 99) for stages in (1, 2, 3)]
    [1, 4, 8]
    """
    return min(max(1, 4 * (from_here - 1)), micro_batches)


WAVEFRONT = Family(wavefront, depth=wavefront_depth, is_early_backward=True)
