"""1F1B without a flush, under several rules for which weights each pass uses.

All raise `BadInput` where a device group holds several stages, or a limit cannot be kept.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import KIND_CODES
from penstock.schedule.clock import times_of
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.family import Family
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.warm_up import warm_up_depths
from penstock.schedule.weight_rule import WeightRule

FORWARD, BACKWARD = KIND_CODES["F"], KIND_CODES["B"]


def vanilla(shape: PipelineShape) -> Schedule:
    """1F1B with an update after every backward, and no correction for stale weights.

    >>> rule = vanilla(PipelineShape(stages=3, micro_batches=4)).weights
    >>> rule.micro_batches_per_update, rule.version, rule.versions
    (1, 'newest', (1, 1, 1))

    Each pass uses the newest weights. So a backward uses other weights than its forward did, and
    what it computes is not the gradient of any loss. It is the baseline for the other rules.
    """
    return asynchronous(shape, WeightRule(1, (1,) * shape.stages))


def pipedream(shape: PipelineShape) -> Schedule:
    """1F1B with weight stashing: an update after every backward (PipeDream, SOSP 2019, 3.3).

    >>> schedule = pipedream(PipelineShape(stages=3, micro_batches=4))
    >>> print(schedule)
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3
    >>> schedule.weights.micro_batches_per_update, schedule.weights.versions
    (1, (3, 2, 1))

    A micro-batch here is a mini-batch of PipeDream. A backward uses the weights of its own forward.
    So a stage keeps one version for every micro-batch in flight, up to ``p - k`` on stage ``k`` of
    ``p``.
    """
    versions = warm_up_depths(shape, min)
    return asynchronous(shape, WeightRule(1, versions, version="forward"))


def pipedream_vertical_sync(shape: PipelineShape) -> Schedule:
    """PipeDream with vertical sync: one weight version on all stages (SOSP 2019, section 3.3).

    >>> rule = pipedream_vertical_sync(PipelineShape(stages=3, micro_batches=4)).weights
    >>> rule.micro_batches_per_update, rule.versions
    (1, (3, 3, 3))

    On every stage, both passes of a micro-batch use the version that stage 0 used in its forward.
    So each stage keeps as many versions as stage 0 has micro-batches in flight.
    """
    depth = warm_up_depths(shape, min)[0]
    rule = WeightRule(1, (depth,) * shape.stages, version="first-stage")
    return asynchronous(shape, rule)


def pipedream_2bw(shape: PipelineShape) -> Schedule:
    """1F1B with two weight versions (PipeDream-2BW, ICML 2021, section 3.1).

    >>> rule = pipedream_2bw(PipelineShape(stages=3, micro_batches=8)).weights
    >>> rule.micro_batches_per_update, rule.versions
    (4, (2, 2, 2))

    An update takes ``m`` micro-batches, at least as many as there are stages
    (`micro_batches_per_update`). So at most one new version appears while a micro-batch is in
    flight, and gradients are one update late on every stage. A single stage has nothing in flight,
    and its gradients are not late.
    """
    size = micro_batches_per_update(shape)
    if shape.stages == 1:
        return asynchronous(shape, WeightRule(size, (1,)))
    rule = WeightRule(size, (2,) * shape.stages, version="update-before")
    return asynchronous(shape, rule)


def spectrain(shape: PipelineShape) -> Schedule:
    """1F1B with weights predicted from momentum (SpecTrain, arXiv 1809.02839, section 3).

    >>> from penstock.schedule.shape import StageCost
    >>> equal = (StageCost(1.0, 0.5, 0.5),) * 4
    >>> rule = spectrain(PipelineShape(stages=4, micro_batches=8, costs=equal)).weights
    >>> rule.forward_lead, rule.backward_lead
    ((3, 2, 2, 1), (0, 0, 1, 1))

    A micro-batch here is a mini-batch of SpecTrain: there is an update after every backward. Both
    passes of a micro-batch use the weights expected when its backward starts on stage 0;
    `prediction_leads` counts the updates until then. A stage keeps its weights and one prediction.
    A single stage predicts nothing.
    """
    forward, backward = prediction_leads(shape)
    versions = tuple(2 if any(lead) else 1 for lead in zip(forward, backward, strict=True))
    rule = WeightRule(1, versions, "momentum", forward, backward)
    return asynchronous(shape, rule)


def spectrain_v2(shape: PipelineShape) -> Schedule:
    """SpecTrain's second version: one prediction for both passes (from its authors' code).

    >>> rule = spectrain_v2(PipelineShape(stages=4, micro_batches=8)).weights
    >>> rule.forward_lead, rule.version, rule.versions
    ((3, 2, 1, 0), 'forward', (5, 4, 3, 1))

    The forward predicts as many updates ahead as its stage makes before the backward. The backward
    uses the same weights. So a stage keeps its weights and one prediction for every micro-batch in
    flight.
    """
    lead = updates_until_backward(shape)
    depths = warm_up_depths(shape, min)
    versions = tuple(1 + d if s else 1 for s, d in zip(lead, depths, strict=True))
    rule = WeightRule(1, versions, "momentum", lead, version="forward")
    return asynchronous(shape, rule)


def pipeoptim(shape: PipelineShape) -> Schedule:
    """1F1B whose forwards predict the weights of their backward (PipeOptim, arXiv 2312.00839).

    >>> rule = pipeoptim(PipelineShape(stages=4, micro_batches=8)).weights
    >>> rule.forward_lead, rule.backward_lead, rule.versions
    ((3, 2, 1, 0), (), (2, 2, 2, 1))

    The prediction uses the optimizer's own step. The backward uses the newest weights. A stage
    keeps its weights and one prediction.
    """
    lead = updates_until_backward(shape)
    versions = tuple(2 if s else 1 for s in lead)
    return asynchronous(shape, WeightRule(1, versions, "optimizer", lead))


def updates_until_backward(shape: PipelineShape) -> tuple[int, ...]:
    """Updates of each stage between a micro-batch's forward and backward in the steady state.

    One less than the micro-batches in flight: the others' backwards come first.
    """
    return tuple(depth - 1 for depth in warm_up_depths(steady(shape), min))


def steady(shape: PipelineShape) -> PipelineShape:
    """The same pipeline with more micro-batches than it ever has in flight."""
    return replace(shape, micro_batches=max(shape.micro_batches, 6 * shape.stages))


def xpipe(shape: PipelineShape) -> Schedule:
    """1F1B with weights predicted from Adam's step (XPipe, arXiv 1911.04610, section 3).

    >>> rule = xpipe(PipelineShape(stages=4, micro_batches=8)).weights
    >>> rule.micro_batches_per_update, rule.forward_lead, rule.backward_lead
    (4, (2, 1, 1, 1), (1, 1, 1, 1))

    A mini-batch is ``T`` micro-batches (`micro_batches_per_update`), and mini-batches follow one
    another without a flush. Weights are predicted for the moment at which the last micro-batch of
    the mini-batch is through. On stage ``k`` of ``N``, counted from the mini-batch's first
    micro-batch, that is ``(N + T - k / 2 - 2) / T`` updates after its forward and
    ``(T + floor(k / 2) - 1) / T`` after its backward, rounded half up. The other micro-batches use
    the same predictions. So a stage keeps its weights and two predictions, one for forwards and one
    for backwards; with ``T = 1`` it keeps one.
    """
    size, stages = micro_batches_per_update(shape), range(shape.stages)
    # Counts are doubled so that they are integers.
    forward = tuple(rounded(2 * (shape.stages + size - 2) - k, 2 * size) for k in stages)
    backward = tuple(rounded(size + k // 2 - 1, size) for k in stages)
    copies = 3 if size > 1 else 2
    versions = tuple(copies if any(lead) else 1 for lead in zip(forward, backward, strict=True))
    rule = WeightRule(size, versions, "adam", forward, backward, bellwether=True)
    return asynchronous(shape, rule)


def rounded(dividend: int, divisor: int) -> int:
    """The integer nearest to a quotient; halves round up."""
    return (2 * dividend + divisor) // (2 * divisor)


def asynchronous(shape: PipelineShape, rule: WeightRule) -> Schedule:
    """1F1B with ``rule`` for its weights."""
    return replace(one_f_one_b(shape), weights=rule)


def micro_batches_per_update(shape: PipelineShape) -> int:
    """The least divisor of the number of micro-batches that is at least the number of stages.

    With at least as many micro-batches as stages two versions suffice; larger updates would only be
    rarer. The divisor makes an iteration end with an update. With fewer micro-batches than stages
    there is one update an iteration.

    >>> [micro_batches_per_update(PipelineShape(4, micro_batches)) for micro_batches in (2, 12, 13)]
    [2, 4, 13]
    """
    count = shape.micro_batches
    return next((m for m in range(shape.stages, count + 1) if count % m == 0), count)


def prediction_leads(shape: PipelineShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of updates that each stage predicts ahead, for a forward and for a backward.

    That is the number of updates of the stage strictly between the start of the pass and the start
    of the micro-batch's backward on stage 0 (SpecTrain, section 3.2). It is counted for a
    micro-batch in the middle of a long iteration, with the costs of the shape. With ``F = B`` and
    free transfers stage ``k`` of ``N`` has ``floor(k / 2) + N - k - 1`` and ``floor(k / 2)``, as
    published.
    """
    # A micro-batch in the middle: the warm-up is over and the drain has not begun.
    long = replace(shape, micro_batches=6 * shape.stages, memory_bytes=())
    middle = 4 * shape.stages
    schedule = one_f_one_b(long)
    times = times_of(schedule, long)

    def passes(stage: int, kind: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        group = long.group_of(stage)
        mine = schedule.of(group).kinds == kind
        return times.start_s[group][mine], times.end_s[group][mine]

    # Times are rounded sums: two that are this close count as the same moment.
    close_s = 1e-9 * times.makespan_s
    reference_s = passes(0, BACKWARD)[0][middle] - close_s
    leads: list[list[int]] = [[], []]
    for stage in range(shape.stages):
        updates_s = passes(stage, BACKWARD)[1]
        for kind, lead in zip((FORWARD, BACKWARD), leads, strict=True):
            started_s = passes(stage, kind)[0][middle] + close_s
            between = np.searchsorted(updates_s, [started_s, reference_s])
            lead.append(max(0, int(between[1] - between[0])))
    return tuple(leads[0]), tuple(leads[1])


def asynchronous_depths(shape: PipelineShape, rule: WeightRule) -> tuple[int, ...]:
    """Micro-batches that each stage has in flight when iterations follow one another without end.

    The same as 1F1B with many micro-batches, however few an iteration has. With two weight versions
    no stage may have more in flight than an update takes.
    """
    depths = warm_up_depths(steady(shape), min)
    if rule.version == "update-before":
        return tuple(min(depth, rule.micro_batches_per_update) for depth in depths)
    return depths


VANILLA = Family(vanilla, flushes=False)
PIPEDREAM = Family(pipedream, flushes=False)
PIPEDREAM_VERTICAL_SYNC = Family(pipedream_vertical_sync, flushes=False)
PIPEDREAM_2BW = Family(pipedream_2bw, flushes=False)
SPECTRAIN = Family(spectrain, flushes=False)
SPECTRAIN_V2 = Family(spectrain_v2, flushes=False)
XPIPE = Family(xpipe, flushes=False)
PIPEOPTIM = Family(pipeoptim, flushes=False)
