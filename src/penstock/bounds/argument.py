"""In words what the bound of a relaxed plan is spent on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.bounds.headroom import TERMS
from penstock.bounds.messages import messages_at
from penstock.bounds.relaxation import Relaxation, RelaxedPlan, RelaxedStage, SizedRelaxation
from penstock.bounds.stage import last_forward_s
from penstock.bounds.traffic import one_way_s, traffic_s
from penstock.plan.run_tables import Floats

__all__ = ["binding_argument"]

CLOSE = 1e-6
"""Figures that differ by less of themselves are the same."""


@dataclass(frozen=True)
class StageTimes:
    """A stage's forward and backward, and its entries of the headroom table by name."""

    forward_s: float
    backward_s: float
    terms: dict[str, float]

    @property
    def whole_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Found:
    """A term of a stage; ``reducing``: the stage whose all-reduce follows, if any does."""

    seconds: float
    stage: RelaxedStage
    times: StageTimes
    name: str
    reducing: RelaxedStage | None


@dataclass(frozen=True)
class Reached:
    """What comes before and after a stage of a relaxed plan.

    When its first forward starts (A of `headroom`), when the one before has ended and sends, what
    follows its last backward (W) and what of that an all-reduce needs, the way through later stages
    and back, and the earlier stage whose all-reduce comes last, if that is what follows.
    """

    first_s: float
    sent_s: float
    after_s: float
    reduced_s: float
    below_s: float
    reducing: RelaxedStage | None


LAST_WORDS = {
    "gradients in": "the links of its devices, which take in the gradients of {} after the first "
    "has been down and back",
    "in flight": "memory: too few of {} in flight before its last forward, which then goes down "
    "and back",
    "activations in": "the links of its devices, which take in the activations of {}; the last "
    "then go down and back",
    "activations out": "the links of its devices, which send the activations of {}; the last then "
    "go down and back",
}
"""How terms of the last forward and of the first gradient are called."""


def binding_argument(relaxed: Relaxation, plan: RelaxedPlan) -> str:
    """Which stage of the relaxed plan binds, and by what.

    The terms of the program once more, for the stages of one plan.
    """
    sized = relaxed.of_size(plan.micro_batch_size)
    entries = [sized.terms(stage, plan.seconds) for stage in plan.stages]
    times = [times_of(sized, *pair) for pair in zip(plan.stages, entries, strict=True)]
    found: list[Found] = []
    ways = ways_of(sized, plan, times)
    for number, reached in enumerate(ways):
        stage, its = plan.stages[number], times[number]
        earlier = {
            "after_forward": reached.first_s,
            "round_trip": reached.first_s + reached.after_s,
            "after_drain": reached.after_s,
            "thin_drain": reached.sent_s + reached.after_s,
            "thin": reached.sent_s,
            "thin_both": reached.first_s + reached.reduced_s,
            "before_thin_drain": reached.reduced_s,
            "sent": reached.first_s + reached.reduced_s,
            "alone": 0.0,
        }
        for name, seconds in earlier.items():
            later = name not in ("alone", "after_forward", "thin")
            reducing = reached.reducing if later else None
            found.append(Found(seconds + its.terms[name], stage, its, name, reducing))
        follows_s, reducing = reached.after_s + its.backward_s, reached.reducing
        if its.terms["tail"] > follows_s * (1 + CLOSE):
            follows_s, reducing = its.terms["tail"], stage
        terms = last_terms(sized, reached, stage, its, more_readers(sized, plan, number))
        for name, seconds in terms.items():
            back_s = seconds + reached.below_s
            found.append(Found(back_s + follows_s, stage, its, name, reducing))
        # What is late here is late at the stages after it, whose all-reduces come after it too.
        for k in range(number + 1, len(times)):
            way_s = ways[k].first_s + times[k].forward_s - reached.first_s - its.forward_s
            for name, down_s in (("in flight", way_s + ways[k].below_s), ("activations out", 0.0)):
                late_s = terms[name] + down_s + times[k].terms["tail"]
                found.append(Found(late_s, stage, its, name, plan.stages[k]))
    binding = max(found, key=lambda one: one.seconds)
    words = f"{stage_text(binding.stage, len(plan.stages))}: {cause(sized, binding)}"
    if binding.reducing is binding.stage:
        words += "; then its all-reduce"
    elif binding.reducing:
        layers = binding.reducing.layers
        words += f"; then the all-reduce of layers {layers.start}-{layers.stop - 1}"
    return words


def ways_of(
    sized: SizedRelaxation, plan: RelaxedPlan, times: Sequence[StageTimes]
) -> list[Reached]:
    """What comes before and after each stage."""
    hops = [hop_s(sized, *pair) for pair in pairwise(plan.stages)]
    below_s = [0.0] * len(times)
    for number in range(len(hops) - 1, -1, -1):
        below_s[number] = sum(hops[number]) + times[number + 1].whole_s + below_s[number + 1]
    ways: list[Reached] = []
    first_s = sent_s = after_s = reduced_s = 0.0
    reducing: RelaxedStage | None = None
    for number, (stage, its) in enumerate(zip(plan.stages, times, strict=True)):
        ways.append(Reached(first_s, sent_s, after_s, reduced_s, below_s[number], reducing))
        down_s, up_s = hops[number] if number < len(hops) else (0.0, 0.0)
        sent_s = first_s + its.forward_s
        first_s = sent_s + down_s
        after_s += its.backward_s
        if its.terms["tail"] > after_s * (1 + CLOSE):
            after_s, reducing = its.terms["tail"], stage
        after_s += up_s
        reduced_s = max(its.terms["reduced"], reduced_s)
    return ways


def hop_s(sized: SizedRelaxation, before: RelaxedStage, stage: RelaxedStage) -> tuple[float, float]:
    """Mean seconds of the messages between two stages, down and up."""
    relaxed, cut = sized.relaxed, stage.layers.start
    reader, limits = relaxed.tables.near.reader, relaxed.limits
    kind = 1 if len(before.layers) > 1 and reader[1, cut] < stage.layers.stop else 0
    if reader[kind, cut] >= stage.layers.stop:
        return 0.0, 0.0
    down_s, up_s, _, _ = messages_at(
        sized.near[kind],
        cut,
        before.option.most_replicas,
        stage.option.most_replicas,
        sized.rows,
        0,
        limits.latency_s,
        1 / limits.best_rate,
        limits.there_and_back,
    )
    return float(down_s), float(up_s)


def more_readers(sized: SizedRelaxation, plan: RelaxedPlan, number: int) -> tuple[float, float]:
    """Seconds in which a stage sends a tensor to all stages but one that read it, if many do.

    And those in which it takes in their gradients.
    """
    hub, stage = sized.relaxed.tables.hub, plan.stages[number]
    if hub.producer not in stage.layers:
        return 0.0, 0.0
    count = sum(hub.reader[s.layers.start] < s.layers.stop for s in plan.stages[number + 1 :])
    figures = sized.figures[sized.options.index(stage.option)]
    latency_s, more = sized.relaxed.limits.latency_s, max(0, count - 1) * sized.batches
    return (
        float(more * traffic_s(hub.size[0], sized.rows, latency_s, figures[10], figures[6])),
        float(more * traffic_s(hub.size[1], sized.rows, latency_s, figures[9], figures[5])),
    )


def last_terms(
    sized: SizedRelaxation,
    reached: Reached,
    stage: RelaxedStage,
    its: StageTimes,
    more: tuple[float, float],
) -> dict[str, float]:
    """When a stage has done its last forward at least, or sent all activations.

    Or, but for a micro-batch's way down and back, has taken in all gradients.
    """
    terms, batches = its.terms, sized.batches
    carried = sized.relaxed.tables.all_traffic[:, stage.layers.start, stage.layers.stop]
    question = np.array([batches, sized.rows, sized.relaxed.limits.latency_s])
    in_s, back_in_s, _, out_s, _ = one_way_s(
        carried, sized.figures[sized.options.index(stage.option)], question
    )
    in_flight: list[float] = []
    for depth, again_s in ((terms["kept"], 0.0), (terms["recomputed"], terms["again"])):
        if depth > 0:
            held = (its.forward_s, its.backward_s, again_s, reached.below_s, batches, depth)
            in_flight.append(last_forward_s(reached.first_s, *held))
    done_s = reached.first_s + its.forward_s
    found = {
        "in flight": min(in_flight, default=0.0),
        "activations in": reached.sent_s + float(in_s) + its.forward_s,
        "activations out": done_s + float(out_s) + more[0],
    }
    if reached.below_s > 0:
        found["gradients in"] = done_s + float(back_in_s) + more[1]
    return found


def times_of(sized: SizedRelaxation, stage: RelaxedStage, entry: Floats) -> StageTimes:
    """The times of a relaxed stage."""
    own = sized.times[:, stage.layers.stop] - sized.times[:, stage.layers.start]
    option = stage.option
    return StageTimes(
        forward_s=float(own[0] / option.fastest + own[1] * option.row_s),
        backward_s=float(own[2] / option.fastest + own[3] * option.row_s),
        terms=dict(zip(TERMS, map(float, entry), strict=True)),
    )


def stage_text(stage: RelaxedStage, stages: int) -> str:
    """The stage for people."""
    replicas = stage.option.replicas
    devices = "1 device" if replicas == 1 else f"{replicas} devices"
    if stages == 1:
        return f"all layers on {devices}"
    return f"stage of layers {stage.layers.start}-{stage.layers.stop - 1} on {devices}"


def cause(sized: SizedRelaxation, found: Found) -> str:
    """What a term consists of."""
    stage, times, name = found.stage, found.times, found.name
    batches, rows = sized.batches, sized.rows
    of_all = f"{batches} micro-batches of {rows}" if batches > 1 else f"one micro-batch of {rows}"
    if name in LAST_WORDS:
        return LAST_WORDS[name].format(of_all)
    value, busy_s = times.terms[name], batches * times.whole_s
    tail_s = times.terms["tail"]
    if name == "round_trip":
        if value > busy_s * (1 + CLOSE):
            return f"memory: too few of {of_all} in flight, or recompute, between fill and drain"
        return f"its compute for {of_all} between fill and drain"
    if name == "after_forward" and value <= (busy_s - times.backward_s + tail_s) * (1 + CLOSE):
        if tail_s <= times.backward_s * (1 + CLOSE):
            return f"its compute for {of_all} after the fill"
        return f"the all-reduce and step after its compute for {of_all}{rate_text(stage)}"
    slow_s = slowest_s(sized, stage)
    if name == "thin_both" and value <= slow_s * (1 + CLOSE):
        return f"its compute for {of_all} on the fullest replica"
    if name == "thin" and value <= (slow_s + times.terms["reduced"]) * (1 + CLOSE):
        return f"its compute for {of_all} on the fullest replica, and the all-reduce and step"
    return f"the links of its devices, which carry the messages of {of_all}"


def slowest_s(sized: SizedRelaxation, stage: RelaxedStage) -> float:
    """Compute of all micro-batches on the slowest replica."""
    own = sized.times[:, stage.layers.stop] - sized.times[:, stage.layers.start]
    option = stage.option
    fixed_s, rows_s = (own[0] + own[2]) / option.fastest, (own[1] + own[3]) * option.slowest_row_s
    return float(sized.batches * (fixed_s + rows_s))


def rate_text(stage: RelaxedStage) -> str:
    """The rate at which a ring over the stage's devices runs at best."""
    if not stage.option.placement.ways:
        return ""
    ring = stage.option.placement.ways[0]
    replicas = stage.option.replicas
    rate = 2 * (replicas - 1) / replicas / ring.s_per_byte if ring.s_per_byte else 0.0
    return f", at {rate / 1e9:.3g} GB/s at best"
