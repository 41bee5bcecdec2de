"""The resource that limits a plan, and why one plan beats another, in numbers and in words.

Everything comes from the simulated timeline: the shares are those of its critical path.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.advice.assessment import PlannedPipeline
from penstock.advice.path_shares import (
    AllReduce,
    PathShare,
    ShareKind,
    Utilisation,
    all_reduces,
    busiest_stage,
    path_shares,
    utilisations,
)
from penstock.cluster.cluster import Cluster, with_boundless_memory
from penstock.costs.stage_costs import plan_peaks_bytes
from penstock.files import Json
from penstock.plan.plan import Plan, with_cut, with_recompute
from penstock.plan.problem import PlanningProblem
from penstock.schedule.registry import FAMILIES
from penstock.simulate.score import make_score
from penstock.text import percent_text, seconds_text, size_text
from penstock.timeline.critical_path import critical_path, seconds_on_path

LEAST_GAIN = 1e-3
"""A smaller gain, as a part of the iteration, is not mentioned."""


@dataclass(frozen=True, slots=True)
class Fullness:
    """A device with the bytes that a plan needs, the bytes that it may use, and the reserve."""

    device: int
    needed_bytes: float
    limit_bytes: float
    reserved_bytes: float = 0.0

    @property
    def share(self) -> float:
        """The part of the limit that is needed; above 1 where the plan does not fit."""
        return self.needed_bytes / self.limit_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A plan that differs in one respect, in words; its seconds, and its fullest device."""

    text: str
    plan: Plan
    iteration_s: float = 0.0
    fullest: Fullness | None = None


def best_forbidden(problem: PlanningProblem, plan: Plan, stage: int) -> Change | None:
    """The small change to ``plan`` that gains most of those that memory alone forbids.

    ``stage`` is the one whose layers are moved. None where no such change gains `LEAST_GAIN` of the
    iteration.
    """
    free_score = make_score(replace(problem, cluster=with_boundless_memory(problem.cluster)))
    best, best_s = None, free_score(plan) * (1 - LEAST_GAIN)
    for change in changes_of(plan, stage):
        fullest = fullest_device(problem, change.plan)
        if fullest.share <= 1:
            continue
        seconds = free_score(change.plan)
        if seconds < best_s:
            best, best_s = replace(change, iteration_s=seconds, fullest=fullest), seconds
    return best


def changes_of(plan: Plan, stage: int) -> Iterator[Change]:
    """The plan without recompute, with one layer of ``stage`` moved, or with a deeper warm-up."""
    if any(s.recompute or s.by_block for s in plan.stages):
        yield Change("keeping all activations", with_recompute(plan, False))
    layers = plan.stages[stage].layers
    if len(layers) > 1:
        if stage > 0:
            text = f"moving layer {layers.start} from stage {stage} to stage {stage - 1}"
            yield Change(text, with_cut(plan, stage, layers.start + 1))
        if stage + 1 < len(plan.stages):
            text = f"moving layer {layers.stop - 1} from stage {stage} to stage {stage + 1}"
            yield Change(text, with_cut(plan, stage + 1, layers.stop - 1))
    if plan.in_flight_limit:
        yield Change("keeping more micro-batches in flight", replace(plan, in_flight_limit=()))


def fullest_device(problem: PlanningProblem, plan: Plan) -> Fullness:
    """The device with the largest part of its memory needed by ``plan``."""
    peaks = dict(zip(plan.devices, plan_peaks_bytes(problem, plan), strict=True))
    return fullest_of(problem.cluster, peaks)


def fullest_of(cluster: Cluster, peaks: Mapping[int, float]) -> Fullness:
    """The device with the largest part of its memory in use, from the peak bytes of each."""
    fullnesses = (
        Fullness(index, peak, device.memory_bytes, device.reserved_bytes)
        for index, peak in peaks.items()
        for device in [cluster.devices[index]]
    )
    return max(fullnesses, key=lambda fullness: fullness.share)


LEAST_SHARE = 0.02
"""A share below this part of the iteration is left out of the words."""

NEAR_THE_LIMIT = 0.9
"""A device counts as full from this part of its memory on."""

BINDS: dict[ShareKind, str] = {
    "compute": "computing in {where}",
    "fill and drain": "filling and draining the pipeline",
    "other stages": "stages that hold one another up ({where})",
    "recompute": "computing activations again",
    "transfers": "transfers ({where})",
    "all-reduce": "all-reduce ({where})",
    "optimizer step": "the optimizer step",
    "waiting": "waits",
}
"""Names of what limits a plan, by kind of share."""

CAUSES: dict[ShareKind, str] = {
    "compute": "computing in its busiest stage ({where}) takes {its}",
    "fill and drain": "filling and draining the pipeline takes {its}",
    "other stages": "its stages hold one another up for {its}",
    "recompute": "computing activations again takes {its}",
    "transfers": "it waits {its} for transfers ({where})",
    "optimizer step": "its optimizer step takes {its}",
    "waiting": "it waits {its}",
}
"""Causes of a slower plan, in words, by kind of share; all-reduce has `all_reduce_words`."""


@dataclass(frozen=True)
class Explanation:
    """One plan's critical path by resource, its busiest resource, and its memory."""

    planner: str
    iteration_s: float
    shares: tuple[PathShare, ...]
    forward_s: float
    backward_s: float
    all_reduce: AllReduce | None
    busiest: Utilisation
    busiest_link: Utilisation | None
    fullest: Fullness
    forbidden: Change | None

    def seconds(self, kind: ShareKind) -> float:
        """Seconds of one kind on the critical path."""
        return sum(share.seconds for share in self.shares if share.kind == kind)

    def where(self, kind: ShareKind) -> str:
        """The place where most of one kind is spent."""
        return next((share.where for share in self.shares if share.kind == kind), "")

    def to_json(self) -> dict[str, Json]:
        """Seconds of the critical path, utilisations and the words."""
        return {
            "binds": self.shares[0].kind if self.shares else "",
            "critical_path_s": {share.kind: share.seconds for share in self.shares},
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "hidden_all_reduce_s": self.all_reduce.hidden_s if self.all_reduce else 0.0,
            "exposed_all_reduce_s": self.all_reduce.after_s if self.all_reduce else 0.0,
            "busiest": self.busiest.resource,
            "busiest_share": self.busiest.share,
            "fullest_device": self.fullest.device,
            "memory_share": self.fullest.share,
            "words": list[Json](explanation_words(self)),
        }


def explain_plan(planned: PlannedPipeline, problem: PlanningProblem) -> Explanation:
    """Explain what limits a plan of ``problem``.

    What memory forbids is given for the planners' own schedules only. Under the others each change
    that is tried would need a new order.
    """
    timeline, plan = planned.prediction.timeline, planned.plan
    own = problem.with_state_on(plan.state_on)
    shares = path_shares(timeline, problem.cluster)
    path = critical_path(timeline)
    by_kind = seconds_on_path(path)
    used = utilisations(timeline, problem.cluster)
    links = [u for u in used if u.carries]
    stage, is_planned = max(0, busiest_stage(path)), FAMILIES[plan.schedule].is_planned
    peaks = {device: planned.prediction.peak_memory_bytes[device] for device in plan.devices}
    return Explanation(
        planner=plan.planner,
        iteration_s=planned.prediction.iteration_s,
        shares=shares,
        forward_s=sum(s for (kind, _), s in by_kind.items() if kind == "F"),
        backward_s=sum(s for (kind, _), s in by_kind.items() if kind in ("B", "I", "W")),
        all_reduce=max(all_reduces(timeline), key=lambda a: a.after_s, default=None),
        busiest=used[0],
        busiest_link=links[0] if links else None,
        fullest=fullest_of(problem.cluster, peaks),
        forbidden=best_forbidden(own, plan, stage) if is_planned else None,
    )


def explanation_words(explanation: Explanation) -> list[str]:
    """Describe what limits a plan, in sentences."""
    bound, busiest, link = "Nothing takes any time.", explanation.busiest, explanation.busiest_link
    if parts := large_shares(explanation):
        rest = f"; then {'; '.join(parts[1:])}" if parts[1:] else ""
        bound = f"Bound by {parts[0]} of the iteration{rest}."
    busy = f"Busiest: {busiest.resource}, {percent_text(busiest.share)}"
    if link and link != busiest:
        busy += f"; of the network {link.resource}, {percent_text(link.share)}"
    return [bound, path_words(explanation), f"{busy}.", *remarks(explanation)]


def remarks(explanation: Explanation) -> list[str]:
    """Describe what memory forbids, in a sentence; often none."""
    words: list[str] = []
    fullest, forbidden = explanation.fullest, explanation.forbidden
    if forbidden and forbidden.fullest:
        words.append(
            f"Memory forbids {forbidden.text}: {seconds_text(forbidden.iteration_s)}, but device "
            f"{forbidden.fullest.device} would need {memory_words(forbidden.fullest)}."
        )
    elif fullest.share >= NEAR_THE_LIMIT:
        words.append(f"Device {fullest.device} is full: {memory_words(fullest)}.")
    return words


def explanation_cells(explanation: Explanation) -> list[str]:
    """Cells of an explanation: seconds, shares, busiest resource, fullest device, remarks."""
    shares, busiest, fullest = large_shares(explanation), explanation.busiest, explanation.fullest
    return [
        seconds_text(explanation.iteration_s),
        *(shares[:1] or ["nothing"]),
        "; ".join(shares[1:]),
        f"{busiest.resource}, {percent_text(busiest.share)}",
        f"{fullest.device}: {size_text(fullest.needed_bytes)} of {size_text(fullest.limit_bytes)}",
        " ".join(remarks(explanation)),
    ]


def memory_words(fullness: Fullness) -> str:
    """The bytes in use, the limit, and the reserve where there is one."""
    words = f"{size_text(fullness.needed_bytes)} of {size_text(fullness.limit_bytes)}"
    reserve = fullness.reserved_bytes
    return f"{words}, with {size_text(reserve)} kept free" if reserve else words


def large_shares(explanation: Explanation) -> list[str]:
    """The shares that are worth a word, with their parts of the iteration."""
    return [
        f"{BINDS[share.kind].format(where=share.where)}, "
        f"{percent_text(share.seconds / explanation.iteration_s)}"
        for share in explanation.shares
        if share.seconds >= LEAST_SHARE * explanation.iteration_s
    ]


def path_words(explanation: Explanation) -> str:
    """The critical path by kind of work."""
    whole_s = explanation.iteration_s
    parts = [
        ("forward", explanation.forward_s),
        ("backward", explanation.backward_s),
        ("recompute", explanation.seconds("recompute")),
        ("transfers", explanation.seconds("transfers")),
        ("all-reduce", explanation.seconds("all-reduce")),
        ("optimizer step", explanation.seconds("optimizer step")),
        ("waiting", explanation.seconds("waiting")),
    ]
    shown = [
        f"{name} {seconds_text(s)} ({percent_text(s / whole_s)})" for name, s in parts if s > 0
    ]
    return f"Critical path: {', '.join(shown)}."


def why_slower(winner: Explanation, other: Explanation) -> str:
    """Explain why ``other`` is slower than ``winner``: the shares that differ most."""
    loss_s = other.iteration_s - winner.iteration_s
    if loss_s <= 1e-9 * winner.iteration_s:
        return f"{other.planner} is as fast as {winner.planner}."
    kinds: set[ShareKind] = {share.kind for share in (*winner.shares, *other.shares)}
    losses: list[tuple[float, ShareKind]] = sorted(
        ((other.seconds(kind) - winner.seconds(kind), kind) for kind in kinds), reverse=True
    )
    causes = [
        cause_words(winner, other, kind) for lost_s, kind in losses if lost_s >= 0.15 * loss_s
    ]
    gained_s, kind = losses[-1]
    although = ""
    if gained_s <= -0.25 * loss_s:
        although = f"; what it gains: {cause_words(winner, other, kind)}"
    return (
        f"{other.planner} loses {seconds_text(loss_s)} "
        f"({percent_text(loss_s / winner.iteration_s)}) against {winner.planner}: "
        f"{', and '.join(causes)}{although}."
    )


def cause_words(winner: Explanation, other: Explanation, kind: ShareKind) -> str:
    """One kind of the difference, with both times."""
    if kind == "all-reduce":
        return f"its {all_reduce_words(other)} and {winner.planner}'s {all_reduce_words(winner)}"
    cause = CAUSES[kind].format(
        where=other.where(kind) or winner.where(kind), its=seconds_text(other.seconds(kind))
    )
    return f"{cause} instead of {seconds_text(winner.seconds(kind))}"


def all_reduce_words(explanation: Explanation) -> str:
    """Seconds of all-reduce after the backwards, and the part that they hide, in words."""
    found = explanation.all_reduce
    if found is None:
        return "plan has no all-reduce"
    return (
        f"all-reduce of stage {found.stage} ends {seconds_text(found.after_s)} after the last "
        f"backward ({seconds_text(found.hidden_s)} of {seconds_text(found.seconds)} hidden)"
    )
