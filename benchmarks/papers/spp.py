"""SPP's headline figure (arXiv 2204.10562): its gain over other planners on uneven links."""

import random
from collections.abc import Iterator, Sequence

from claim import Claim
from reproduction.published import SPP_GAIN

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.toml_file import find_cluster
from penstock.errors import Infeasible
from penstock.planners.dapple.dapple import dapple
from penstock.planners.data_parallel import data_parallel
from penstock.planners.gpipe import gpipe
from penstock.planners.pipedream.pipedream import pipedream
from penstock.planners.problem import planning_problem
from penstock.planners.spp.spp import spp
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

PAPER = "SPP"
DEVICES = (8, 16)
SPREADS = (10, 30, 100, 1000)
SPREAD = 100
FASTEST_BYTES_PER_S = 12.5e9
LATENCY_S = 20e-6
BATCHES = {"bert-48": 64, "gnmt-16": 1024, "vgg-19": 2048}
BASELINES = {
    "data-parallel": data_parallel,
    "gpipe": gpipe,
    "pipedream": pipedream,
    "dapple": dapple,
}
NAMED = ("data-parallel", "gpipe", "pipedream")
"""Baselines of the paper's time; which of them its largest gain is over is not said."""


def spp_claims(quick: bool) -> Iterator[Claim]:
    """The largest gain by number of devices; with ``quick`` only that on a graph."""
    yield on_graph()
    if quick:
        return
    overs: dict[str, tuple[Sequence[str], float | None]] = {
        "the best of data parallelism, GPipe and PipeDream": (NAMED, 100 * SPP_GAIN),
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
    clusters = [uneven_cluster(devices, spread, seed) for seed in range(3)]
    return [gains(model, cluster) for model in BATCHES for cluster in clusters]


def uneven_cluster(devices: int, spread: float, seed: int) -> Cluster:
    """A complete graph of equal devices; rates of links are drawn log-uniformly over ``spread``."""
    draw = random.Random(f"{devices} {spread} {seed}")
    links: list[Link] = []
    for i in range(devices):
        for j in range(i):
            rate = FASTEST_BYTES_PER_S * spread ** -draw.random()
            links += [Link(i, j, rate, LATENCY_S), Link(j, i, rate, LATENCY_S)]
    host = Host("graph", (Device("V100-16GB", 16e9),) * devices, FASTEST_BYTES_PER_S)
    return Cluster(f"uneven-{spread}", (host,), tuple(links))


def gains(model: str, cluster: Cluster) -> dict[str, float]:
    """The gain of SPP over every baseline that has a plan: its iteration over SPP's, minus 1."""
    profile, batch = find_profile(model), BATCHES[model]
    problem = planning_problem(profile, cluster, batch, memory_reserve=0.0, as_fast=0.0)
    score = make_score(problem)
    ours_s = score(spp(problem, score))
    found: dict[str, float] = {}
    for name, planner in BASELINES.items():
        try:
            found[name] = score(planner(problem, score)) / ours_s - 1
        except Infeasible:
            continue
    return found


def on_graph() -> Claim:
    """On the preset with a link of its own between any two devices."""
    gain = gains("bert-48", find_cluster("graph-8"))["dapple"]
    what, setting = "speed over `dapple`'s plan, `graph-8`", "BERT-48, 64 samples, 8 devices"
    return Claim(PAPER, what, setting, None, 1 + gain)
