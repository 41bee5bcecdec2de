"""Claims carried out by real processes on emulated devices and links."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from claim import Claim
from reproduction.balanced_stages import balanced_stages
from reproduction.bapipe_forms import closed_form_s
from reproduction.dapple_runtime import MICRO_BATCH, row_inputs
from spp import ON_GRAPH, planned_on_graph

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.plan.problem import Planner
from penstock.planners.dapple.dapple import dapple
from penstock.planners.spp.spp import spp
from penstock.profile.model_profile import Affine, Edge, ModelProfile
from penstock.rehearse.emulation import emulation_of
from penstock.rehearse.rehearsal import rehearse

__all__ = ["with_recorded", "with_rehearsal"]

SLOWLY = 5.0
"""Where an iteration is so short that late wake-ups would count."""


def rehearsed_s(
    plan: Plan, profile: ModelProfile, cluster: Cluster, time_scale: float = 0.0
) -> float:
    """Seconds of the second of two iterations, at a scale of time (0: chosen)."""
    return rehearse(emulation_of(plan, profile, cluster, time_scale=time_scale)).rehearsed_s


def over_gpipe() -> float:
    """DAPPLE's throughput with 16 micro-batches over GPipe's with 2."""
    # The rows have no messages. Without any, ranks would not wait for one another.
    small = Affine(0, 1000 / MICRO_BATCH)

    def sample_s(schedule: str, count: int) -> float:
        plan, profile, cluster = row_inputs(schedule, False, count)
        joined = replace(profile, edges=(Edge(0, 1, "activations", small, small),))
        return rehearsed_s(plan, joined, cluster, SLOWLY) / (count * MICRO_BATCH)

    return sample_s("gpipe", 2) / sample_s("1f1b", 16)


def overlapped_form() -> float:
    """BaPipe's form with overlap, on four stages."""
    inputs = balanced_stages("1f1b-so", 4, 32, forward_s=1.0, backward_s=2.0, transfer_s=0.5)
    return rehearsed_s(*inputs) / closed_form_s("1f1b-so", 4, 32, 3.0, 0.5)


def over_dapple_on_graph() -> float:
    """On eight processes, each with a link of its own to every other."""

    def seconds(planner: Planner) -> float:
        problem, plan = planned_on_graph(planner)
        return rehearsed_s(plan, problem.profile, problem.cluster, SLOWLY)

    return seconds(dapple) / seconds(spp)


REHEARSALS: dict[str, Callable[[], float]] = {
    "throughput over GPipe's": over_gpipe,
    "closed form of 1f1b-so: simulated over published": overlapped_form,
    ON_GRAPH: over_dapple_on_graph,
}
"""By what is claimed; of several settings the last one is rehearsed."""


def with_rehearsal(claims: list[Claim]) -> list[Claim]:
    """The same claims, those of `REHEARSALS` with what real processes took."""
    last = {claim.what: number for number, claim in enumerate(claims)}
    found = list(claims)
    for what, measure in REHEARSALS.items():
        if what in last:
            found[last[what]] = replace(claims[last[what]], rehearsed=measure())
    return found


def with_recorded(claims: list[Claim], recorded: list[dict[str, Any]]) -> list[Claim]:
    """The same claims, with what was rehearsed before."""
    known = {(claim["what"], claim["setting"]): claim["rehearsed"] for claim in recorded}
    return [replace(claim, rehearsed=known.get((claim.what, claim.setting))) for claim in claims]
