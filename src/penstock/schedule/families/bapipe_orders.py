"""The four schedules of BaPipe (arXiv 2012.12544), under the names of its paper.

An iteration has ``M`` micro-batches on ``N`` stages; a transfer takes ``SR`` seconds. Stages are
counted from 1. BaPipe's figures are

    1F1B-AS    (M + N - 1) (F + B)                         stage i holds N - i + 1
    1F1B-SNO   (M + N - 1) (F + B) + 2 (N + M - 2) SR      the same
    1F1B-SO    (M + N - 1) (F + B) + 2 (N - 1) SR          stage i warms up with 2 (N - i) + 1
    FBP-AS     (M + N - 1) (F + B)                         stage i holds 2 (N - i + 1)

1F1B-AS is for accelerators that send while they compute, 1F1B-SNO for GPUs whose transfers block
both ends: that depends on the cluster, and the order of both is 1F1B. 1F1B-SO overlaps transfers
with work by a deeper warm-up, as in DAPPLE's policy P_B; in-flight limits shorten it.
"""

from dataclasses import replace
from functools import partial

from penstock.schedule.families.early_backward import deep_in_flight, early_backward
from penstock.schedule.family import Family
from penstock.schedule.fitting import first_that_fits
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape


def fbp_as(shape: PipelineShape) -> Schedule:
    """Forwards and backwards side by side on one accelerator (BaPipe, FBP-AS).

    >>> print(fbp_as(PipelineShape(stages=2, micro_batches=5)))
    stage 0   F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
    stage 1   F0 F1 B0 F2 B1 F3 B2 F4 B3 B4

    A forward and a backward that run at once share the compute units of a stage in proportion to
    their work, so that each takes ``F + B``. One that is alone has the whole stage. For ``a`` bytes
    of activations this needs a steady bandwidth of ``2 a / (F + B)``, less than the ``a / F`` of
    1F1B-AS.

    Forwards and backwards are each in the order of 1F1B-SO. The picture shows each backward one
    place later than there: a forward waits for the actions before it and runs beside the backward
    that follows it.
    """
    schedule = early_backward(replace(shape, in_flight_limit=()), twice_in_flight)
    return replace(first_that_fits("fbp-as", shape, [schedule]), concurrent=True)


def twice_in_flight(from_here: int, micro_batches: int) -> int:
    """In-flight depth of a stage in `fbp_as`."""
    return min(2 * from_here, micro_batches)


ONE_F_ONE_B_SO = Family(
    partial(early_backward, depth=deep_in_flight), depth=deep_in_flight, is_early_backward=True
)
FBP_AS = Family(fbp_as, depth=twice_in_flight)
