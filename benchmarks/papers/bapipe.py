"""BaPipe's headline figures (arXiv 2012.12544): closed forms, speed and depth."""

from collections.abc import Iterator
from dataclasses import replace

from claim import Claim
from dapple_scaling import most_layers
from reproduction.bapipe_forms import METHODS, closed_form_s, played_s
from reproduction.published import without_norms

from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import find_cluster
from penstock.errors import Infeasible
from penstock.planning.planning_problem import planning_problem
from penstock.profile.find import find_profile
from penstock.search.search import PLANNERS
from penstock.simulate.score import make_score

__all__ = ["bapipe_claims"]

PAPER = "BaPipe"
FASTER, DEEPER = 3.2, 4.0
BASELINES = ("data-parallel", "pipedream", "gpipe")
MODELS = ("vgg-16", "gnmt-8", "resnet-50")


def bapipe_claims(quick: bool) -> Iterator[Claim]:
    """All claims; few of them with ``quick``."""
    for method in METHODS:
        yield closed_form(method, 2)
        yield closed_form(method, 4)
    yield deeper()
    if not quick:
        yield faster()


def closed_form(method: str, stages: int) -> Claim:
    """The simulator on balanced stages, over the closed form."""
    times = {"forward_s": 1.0, "backward_s": 2.0, "transfer_s": 0.5}
    form_s = closed_form_s(method, stages, 32, 3.0, 0.5)
    own_links_s = played_s(method, stages, 32, **times, separate_links=True)
    return Claim(
        PAPER,
        f"closed form of {method}: simulated over published",
        f"{stages} stages, 32 micro-batches",
        1.0,
        played_s(method, stages, 32, **times) / form_s,
        varied={"links of their own": own_links_s / form_s},
    )


def slower_links(bytes_per_s: float) -> Cluster:
    """The preset of eight V100 with another rate of their links."""
    cluster = find_cluster("bapipe-gpu")
    hosts = tuple(replace(host, link_bytes_per_s=bytes_per_s) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def iteration_s(model: str, planner: str, cluster: Cluster, times: int) -> float:
    """Seconds of a planner's plan, with ``times`` profiled batches for each device."""
    profile = without_norms(find_profile(model))
    batch = profile.batch_size * times * len(cluster.devices)
    problem = planning_problem(
        profile, cluster, batch, planner=planner, memory_reserve=0.0, as_fast=0.0
    )
    score = make_score(problem)
    return score(PLANNERS[planner](problem, score))


def faster() -> Claim:
    """Over data parallelism, PipeDream's plans and GPipe, on three models."""

    def most(bytes_per_s: float, times: int) -> float:
        cluster = slower_links(bytes_per_s)
        return max(gain(model, name, cluster, times) for model in MODELS for name in BASELINES)

    return Claim(
        PAPER,
        "over data- and pipeline-parallel frameworks, the most",
        "8 V100, 10 GB/s, a profiled batch for each; VGG-16, GNMT-8, ResNet-50",
        FASTER,
        most(10e9, 1),
        varied={
            "4 batches": most(10e9, 4),
            "3 GB/s": most(3e9, 1),
            "1.25 GB/s": most(1.25e9, 1),
        },
        at_least=True,
    )


def gain(model: str, baseline: str, cluster: Cluster, times: int) -> float:
    """BaPipe's speed over a baseline's; 0 where that has no plan."""
    ours_s = iteration_s(model, "bapipe", cluster, times)
    try:
        return iteration_s(model, baseline, cluster, times) / ours_s
    except Infeasible:
        return 0.0


def deeper() -> Claim:
    """The largest model by a pipeline, over the largest with a whole model on each device."""
    whole = most_layers(1, 1)
    return Claim(
        PAPER,
        "memory reduction: depth that fits, over data parallelism's",
        "BERT with recompute, 4 V100, one sample at a time",
        DEEPER,
        most_layers(4, 1) / whole,
        varied={"8 V100": most_layers(8, 1) / whole, "2 V100": most_layers(2, 1) / whole},
    )
