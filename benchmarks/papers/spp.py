"""SPP's headline figure (arXiv 2204.10562): its gain over other planners on uneven links."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from claim import Claim

sys.path.append(str(Path(__file__).parents[1] / "planning"))

from uneven_links import BATCHES, PUBLISHED_GAIN, gains

from penstock.cluster.toml_file import find_cluster
from penstock.plan.plan import Plan
from penstock.plan.problem import Planner, PlanningProblem
from penstock.planners.dapple.dapple import dapple
from penstock.planners.spp.spp import spp
from penstock.planning.planning_problem import planning_problem
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

__all__ = ["ON_GRAPH", "planned_on_graph", "spp_claims"]

PAPER = "SPP"
DEVICES = (8, 16)
SPREADS = (10, 30, 100, 1000)
SPREAD = 100
NAMED = ("data-parallel", "gpipe", "pipedream")
"""Baselines of the paper's time; which of them its largest gain is over is not said."""

ON_GRAPH = "speed over `dapple`'s plan, `graph-8`"


def spp_claims(quick: bool) -> Iterator[Claim]:
    """The largest gain by number of devices; with ``quick`` only that on a graph."""
    yield on_graph()
    if quick:
        return
    overs: dict[str, tuple[Sequence[str], float | None]] = {
        "the best of data parallelism, GPipe and PipeDream": (NAMED, 100 * PUBLISHED_GAIN),
        "`dapple`": (("dapple",), None),
    }
    for devices in DEVICES:
        found = {spread: gains_at(devices, spread) for spread in SPREADS}
        for words, (names, published) in overs.items():
            most = {
                spread: 100 * max(min(gain[n] for n in names if n in gain) for gain in gained)
                for spread, gained in found.items()
            }
            yield Claim(
                PAPER,
                f"faster than {words}, at most by",
                f"{devices} devices, links up to {SPREAD} times apart; BERT-48, GNMT-16, VGG-19",
                published,
                most.pop(SPREAD),
                unit="%",
                varied={f"{spread:,} times apart": gain for spread, gain in most.items()},
                assumed=f"links up to {SPREAD} times apart",
            )


def gains_at(devices: int, spread: int) -> list[dict[str, float]]:
    """The gain over each planner that has a plan, for three models on three clusters each."""
    return [gains(model, devices, spread, seed) for model in BATCHES for seed in range(3)]


def planned_on_graph(planner: Planner) -> tuple[PlanningProblem, Plan]:
    """A plan for BERT-48 on the preset with a link of its own between any two devices."""
    problem = planning_problem(
        find_profile("bert-48"),
        find_cluster("graph-8"),
        BATCHES["bert-48"],
        memory_reserve=0.0,
        as_fast=0.0,
    )
    return problem, planner(problem, make_score(problem))


def on_graph() -> Claim:
    """What a rehearsal can show: eight processes on emulated links."""
    problem, ours = planned_on_graph(spp)
    _, other = planned_on_graph(dapple)
    score = make_score(problem)
    ratio = score(other) / score(ours)
    return Claim(PAPER, ON_GRAPH, "BERT-48, 64 samples, 8 devices", None, ratio)
