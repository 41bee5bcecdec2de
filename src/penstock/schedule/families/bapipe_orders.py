"""The four schedules of BaPipe, under the names of its paper.

All raise `BadInput` where a device group holds several stages, or a limit cannot be kept.
"""

from dataclasses import replace

from penstock.schedule.families.early_backward import early_backward, one_f_one_b
from penstock.schedule.family import Family
from penstock.schedule.fitting import checked_fit
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape


def one_f_one_b_as(shape: PipelineShape) -> Schedule:
    """1F1B on accelerators that send while they compute (BaPipe, arXiv 2012.12544, 1F1B-AS).

    >>> print(one_f_one_b_as(PipelineShape(stages=2, micro_batches=3)))
    stage 0   F0 F1 B0 F2 B1 B2
    stage 1   F0 B0 F1 B1 F2 B2

    BaPipe: an iteration takes ``(M + N - 1) (F + B)`` for ``M`` micro-batches and ``N`` stages, and
    stage ``i``, counted from 1, holds ``N - i + 1`` micro-batches. Whether transfers overlap with
    work depends on the cluster, not on the order.
    """
    return checked_fit(one_f_one_b(shape), shape, "1f1b-as")


def one_f_one_b_sno(shape: PipelineShape) -> Schedule:
    """1F1B on GPUs whose transfers do not overlap with work (BaPipe, 1F1B-SNO).

    >>> shape = PipelineShape(stages=2, micro_batches=3)
    >>> one_f_one_b_sno(shape) == one_f_one_b_as(shape)
    True

    The order is that of `one_f_one_b_as`; the two are for different clusters. BaPipe: an
    iteration takes ``(M + N - 1) (F + B) + 2 (N + M - 2) SR``, with transfers of ``SR`` seconds
    that block both ends.
    """
    return checked_fit(one_f_one_b(shape), shape, "1f1b-sno")


def one_f_one_b_so(shape: PipelineShape) -> Schedule:
    """1F1B with twice the warm-up, so that transfers overlap with work (BaPipe, 1F1B-SO).

    >>> print(one_f_one_b_so(PipelineShape(stages=2, micro_batches=4)))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3

    Stage ``i``, counted from 1, warms up with ``min(2 (N - i) + 1, M)`` forwards, as in DAPPLE's
    policy P_B. BaPipe: an iteration takes ``(M + N - 1) (F + B) + 2 (N - 1) SR``. In-flight limits
    shorten the warm-up.
    """
    schedule = early_backward(shape, lambda shape, stage: 2 * (shape.stages - stage) - 1)
    return checked_fit(schedule, shape, "1f1b-so")


def fbp_as(shape: PipelineShape) -> Schedule:
    """Forwards and backwards side by side on one accelerator (BaPipe, FBP-AS).

    >>> print(fbp_as(PipelineShape(stages=2, micro_batches=5)))
    stage 0   F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
    stage 1   F0 F1 B0 F2 B1 F3 B2 F4 B3 B4

    A forward and a backward that run at once share the compute units of a stage in proportion to
    their work, so that each takes ``F + B``. One that is alone has the whole stage. For ``a`` bytes
    of activations this needs a steady bandwidth of ``2 a / (F + B)``, less than the ``a / F`` of
    1F1B-AS. BaPipe: an iteration takes ``(M + N - 1) (F + B)``, and stage ``i``, counted from 1,
    holds ``2 (N - i + 1)`` micro-batches.

    Forwards and backwards are each in the order of 1F1B-SO. The picture shows each backward one
    place later than there: a forward waits for the actions before it and runs beside the backward
    that follows it.
    """
    schedule = early_backward(
        replace(shape, in_flight_limit=()), lambda shape, stage: 2 * (shape.stages - stage)
    )
    return replace(checked_fit(schedule, shape, "fbp-as"), concurrent=True)


ONE_F_ONE_B_AS = Family(one_f_one_b_as, depth=lambda from_here, batches: min(from_here, batches))
ONE_F_ONE_B_SNO = Family(one_f_one_b_sno, depth=ONE_F_ONE_B_AS.depth)
ONE_F_ONE_B_SO = Family(
    one_f_one_b_so, depth=lambda from_here, batches: min(2 * from_here - 1, batches)
)
FBP_AS = Family(fbp_as, depth=lambda from_here, batches: min(2 * from_here, batches))
