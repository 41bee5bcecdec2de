"""SPP's headline figure (arXiv 2204.10562): its gain over other planners on uneven links."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from claim import Claim

sys.path.append(str(Path(__file__).parents[1] / "planning"))

from uneven_links import BASELINES, BATCHES, BEST, PUBLISHED_GAIN, gains

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
SPREADS = (10, 100, 1000)
MOST = SPREADS[-1]
NAMES = {BEST: "the best of the other planners", "naive order": "its own plan in naive order"}
ON_GRAPH = "speed over `dapple`'s plan, `graph-8`"


def spp_claims(quick: bool) -> Iterator[Claim]:
    """The largest gain over each baseline, by devices; with ``quick`` only that on a graph."""
    yield on_graph()
    if quick:
        return
    for devices in DEVICES:
        found = {spread: largest_gains(devices, spread) for spread in SPREADS}
        for name in (BEST, *BASELINES):
            others = NAMES.get(name, f"`{name}`")
            yield Claim(
                PAPER,
                f"faster than {others}, at most by",
                f"{devices} devices, links up to {MOST:,} times apart; BERT-48, GNMT-16, VGG-19",
                100 * PUBLISHED_GAIN,
                100 * found[MOST][name],
                unit="%",
                varied={
                    f"{spread:,} times": 100 * found[spread][name]
                    for spread in SPREADS
                    if spread != MOST
                },
            )


def largest_gains(devices: int, spread: int) -> dict[str, float]:
    """Over three models and three clusters."""
    largest: dict[str, float] = defaultdict(lambda: -1.0)
    for model in BATCHES:
        for seed in range(3):
            for name, gain in gains(model, devices, spread, seed).items():
                largest[name] = max(largest[name], gain)
    return largest


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
