"""1F1B whose weight updates do not wait for the pipeline to drain: one order, many weight rules."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import KIND_CODES
from penstock.schedule.clock import times_of
from penstock.schedule.families.early_backward import fewest_in_flight, one_f_one_b
from penstock.schedule.family import Family
from penstock.schedule.fitting import checked_fit
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.warm_up import warm_up_depths
from penstock.schedule.weight_rule import WeightRule

__all__ = [
    "PIPEDREAM",
    "PIPEDREAM_2BW",
    "PIPEDREAM_VERTICAL_SYNC",
    "PIPEOPTIM",
    "SPECTRAIN",
    "SPECTRAIN_V2",
    "VANILLA",
    "XPIPE",
    "endless_depths",
    "pipedream",
    "pipedream_2bw",
    "pipedream_vertical_sync",
    "pipeoptim",
    "prediction_leads",
    "spectrain",
    "spectrain_v2",
    "vanilla",
    "xpipe",
]

FORWARD, BACKWARD = KIND_CODES["F"], KIND_CODES["B"]


def vanilla(shape: PipelineShape) -> Schedule:
    """1F1B with an update after every backward and nothing done about it.

    >>> rule = vanilla(PipelineShape(stages=3, micro_batches=4)).weights
    >>> rule.micro_batches_per_update, rule.version, rule.versions
    (1, 'newest', (1, 1, 1))

    Each pass uses the weights that there are: a backward others than its forward, so what it
    computes is the gradient of nothing. What the other rules are compared with.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    return without_flush(shape, WeightRule(1, (1,) * shape.stages), "vanilla")


def pipedream(shape: PipelineShape) -> Schedule:
    """1F1B with weight stashing: an update after every backward (PipeDream, SOSP 2019, 3.3).

    >>> schedule = pipedream(PipelineShape(stages=3, micro_batches=4))
    >>> print(schedule)
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3
    >>> schedule.weights.micro_batches_per_update, schedule.weights.versions
    (1, (3, 2, 1))

    PipeDream's mini-batches are the micro-batches here. A backward uses the weights of its own
    forward, so a stage keeps a version for every micro-batch in flight, up to ``p - k`` on stage
    ``k`` of ``p``.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    versions = warm_up_depths(shape, fewest_in_flight)
    return without_flush(shape, WeightRule(1, versions, version="forward"), "pipedream")


def pipedream_vertical_sync(shape: PipelineShape) -> Schedule:
    """PipeDream whose stages all use the version that stage 0 had (SOSP 2019, section 3.3).

    >>> rule = pipedream_vertical_sync(PipelineShape(stages=3, micro_batches=4)).weights
    >>> rule.micro_batches_per_update, rule.versions
    (1, (3, 3, 3))

    Both passes of a micro-batch use on every stage the version that stage 0 had in its forward, so
    a stage keeps the versions of all that stage 0 has in flight.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    depth = warm_up_depths(shape, fewest_in_flight)[0]
    rule = WeightRule(1, (depth,) * shape.stages, version="first-stage")
    return without_flush(shape, rule, "pipedream-vertical-sync")


def pipedream_2bw(shape: PipelineShape) -> Schedule:
    """1F1B with two weight versions (PipeDream-2BW, ICML 2021, section 3.1).

    >>> rule = pipedream_2bw(PipelineShape(stages=3, micro_batches=8)).weights
    >>> rule.micro_batches_per_update, rule.versions
    (4, (2, 2, 2))

    An update takes ``m`` micro-batches, at least as many as stages. So a new version comes at most
    once while a micro-batch is in flight, and gradients are one update late on every stage. For
    ``m`` see `micro_batches_per_update`. A single stage has nothing in flight, and is not late.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    size = micro_batches_per_update(shape)
    if shape.stages == 1:
        return without_flush(shape, WeightRule(size, (1,)), "2bw")
    rule = WeightRule(size, (2,) * shape.stages, version="update-before")
    return without_flush(shape, rule, "2bw")


def spectrain(shape: PipelineShape) -> Schedule:
    """1F1B with weights predicted from momentum (SpecTrain, arXiv 1809.02839, section 3).

    >>> from penstock.schedule.shape import StageCost
    >>> equal = (StageCost(1.0, 0.5, 0.5),) * 4
    >>> rule = spectrain(PipelineShape(stages=4, micro_batches=8, costs=equal)).weights
    >>> rule.forward_lead, rule.backward_lead
    ((3, 2, 2, 1), (0, 0, 1, 1))

    SpecTrain's mini-batches are the micro-batches here: an update after every backward. Forward and
    backward of a micro-batch use the weights expected when its backward starts on stage 0, as
    `prediction_leads` counts. A stage keeps its weights and one prediction, a single stage none.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    forward, backward = prediction_leads(shape)
    versions = tuple(2 if any(lead) else 1 for lead in zip(forward, backward, strict=True))
    rule = WeightRule(1, versions, "momentum", forward, backward)
    return without_flush(shape, rule, "spectrain")


def spectrain_v2(shape: PipelineShape) -> Schedule:
    """SpecTrain's second version: one prediction for both passes (code of its authors).

    >>> rule = spectrain_v2(PipelineShape(stages=4, micro_batches=8)).weights
    >>> rule.forward_lead, rule.version, rule.versions
    ((3, 2, 1, 0), 'forward', (5, 4, 3, 1))

    The forward predicts as many updates ahead as its stage makes until the backward, which uses the
    same weights: a stage keeps the prediction of every micro-batch in flight, and its weights.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    lead = updates_until_backward(shape)
    depths = warm_up_depths(shape, fewest_in_flight)
    versions = tuple(1 + d if s else 1 for s, d in zip(lead, depths, strict=True))
    rule = WeightRule(1, versions, "momentum", lead, version="forward")
    return without_flush(shape, rule, "spectrain-v2")


def pipeoptim(shape: PipelineShape) -> Schedule:
    """1F1B whose forwards predict the weights of their backward (PipeOptim, arXiv 2312.00839).

    >>> rule = pipeoptim(PipelineShape(stages=4, micro_batches=8)).weights
    >>> rule.forward_lead, rule.backward_lead, rule.versions
    ((3, 2, 1, 0), (), (2, 2, 2, 1))

    Predicted by the optimizer's own step; the backward uses the weights that there are by then. A
    stage keeps its weights and one prediction.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    lead = updates_until_backward(shape)
    versions = tuple(2 if s else 1 for s in lead)
    return without_flush(shape, WeightRule(1, versions, "optimizer", lead), "pipeoptim")


def updates_until_backward(shape: PipelineShape) -> tuple[int, ...]:
    """Updates of each stage between a micro-batch's forward and its backward, in the long run.

    One less than the micro-batches in flight, whose backwards come first.
    """
    return tuple(depth - 1 for depth in warm_up_depths(endless(shape), fewest_in_flight))


def endless(shape: PipelineShape) -> PipelineShape:
    """The same pipeline with more micro-batches than it ever has in flight."""
    return replace(shape, micro_batches=max(shape.micro_batches, 6 * shape.stages))


def xpipe(shape: PipelineShape) -> Schedule:
    """1F1B with weights predicted from Adam's step (XPipe, arXiv 1911.04610, section 3).

    >>> rule = xpipe(PipelineShape(stages=4, micro_batches=8)).weights
    >>> rule.micro_batches_per_update, rule.forward_lead, rule.backward_lead
    (4, (2, 1, 1, 1), (1, 1, 1, 1))

    A mini-batch is ``T`` micro-batches, and mini-batches follow one another without a flush. The
    point that weights are predicted for is when the last micro-batch of a mini-batch is through: on
    stage ``k`` of ``N`` that is ``(N + T - k / 2 - 2) / T`` updates after the forward of the first
    and ``(T + floor(k / 2) - 1) / T`` after its backward, rounded, halves up. The others of the
    mini-batch use the weights of the first, so a stage keeps its weights and two predictions, one
    for forwards and one for backwards; with ``T = 1`` one. For ``T`` see
    `micro_batches_per_update`.

    Raises:
        BadInput: a device group holds several stages, or a limit cannot be kept.
    """
    size, stages = micro_batches_per_update(shape), range(shape.stages)
    # Twice the counts, so that they are whole numbers.
    forward = tuple(rounded(2 * (shape.stages + size - 2) - k, 2 * size) for k in stages)
    backward = tuple(rounded(size + k // 2 - 1, size) for k in stages)
    copies = 3 if size > 1 else 2
    versions = tuple(copies if any(lead) else 1 for lead in zip(forward, backward, strict=True))
    rule = WeightRule(size, versions, "adam", forward, backward, bellwether=True)
    return without_flush(shape, rule, "xpipe")


def rounded(dividend: int, divisor: int) -> int:
    """The whole number nearest to a quotient, halves up."""
    return (2 * dividend + divisor) // (2 * divisor)


def without_flush(shape: PipelineShape, rule: WeightRule, name: str) -> Schedule:
    """1F1B with a rule for its weights."""
    return replace(checked_fit(one_f_one_b(shape), shape, name), weights=rule)


def micro_batches_per_update(shape: PipelineShape) -> int:
    """The least number that is at least that of the stages and divides that of the micro-batches.

    Two versions are enough from as many micro-batches as stages on, and more only make updates
    rarer. An iteration ends with an update. With fewer micro-batches than stages it is the only
    one.

    >>> [micro_batches_per_update(PipelineShape(4, micro_batches)) for micro_batches in (2, 12, 13)]
    [2, 4, 13]
    """
    count = shape.micro_batches
    return next((m for m in range(shape.stages, count + 1) if count % m == 0), count)


def prediction_leads(shape: PipelineShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many updates ahead each stage predicts, for a forward and for a backward.

    The number of updates of the stage that end after the pass has started and before the
    micro-batch's backward starts on stage 0, both strictly (SpecTrain, section 3.2), counted for
    one micro-batch of a long iteration with the costs of the shape. For ``F = B`` and free
    transfers stage ``k`` of ``N`` has ``floor(k / 2) + N - k - 1`` and ``floor(k / 2)``, the
    published forms.
    """
    # Late enough that the fill is over, and early enough that the drain has not begun.
    long = replace(shape, micro_batches=6 * shape.stages, memory_bytes=())
    middle = 4 * shape.stages
    schedule = one_f_one_b(long)
    times = times_of(schedule, long)

    def passes(stage: int, kind: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        group = long.group_of(stage)
        mine = schedule.of(group).kinds == kind
        return times.start_s[group][mine], times.end_s[group][mine]

    # Times are sums of rounded figures: what is this close counts as the same moment.
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


def endless_depths(shape: PipelineShape, rule: WeightRule) -> tuple[int, ...]:
    """Micro-batches that each stage has in flight where batches follow one another without end.

    As of 1F1B, however few micro-batches a batch has; but two versions are only enough if no stage
    has more in flight than an update takes.
    """
    depths = warm_up_depths(endless(shape), fewest_in_flight)
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
