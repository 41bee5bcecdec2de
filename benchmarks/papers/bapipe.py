"""BaPipe's headline figures (arXiv 2012.12544): closed forms, speed and depth."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from claim import Claim
from dapple_scaling import most_layers
from reproduction.bapipe_forms import METHODS, closed_form_s, played_s
from reproduction.published import BAPIPE_DEEPER, BAPIPE_FASTER, without_norms

from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import find_cluster
from penstock.errors import Infeasible
from penstock.planners.problem import planning_problem
from penstock.planners.search.search import PLANNERS
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

PAPER = "BaPipe"
MICRO_BATCHES = 32
BASELINES = ("data-parallel", "pipedream", "gpipe")
MODELS = ("vgg-16", "gnmt-8", "resnet-50")


def bapipe_claims(quick: bool) -> Iterator[Claim]:
    """All claims; few of them with ``quick``."""
    for method in METHODS:
        yield closed_form(method, 2)
        yield closed_form(method, 4)
    yield from deeper()
    if not quick:
        yield from faster()


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


@cache
def iteration_s(model: str, planner: str, cluster: Cluster, times: int) -> float:
    """Seconds of a planner's plan, with ``times`` profiled batches for each device."""
    profile = without_norms(find_profile(model))
    batch = profile.batch_size * times * len(cluster.devices)
    problem = planning_problem(
        profile, cluster, batch, planner=planner, memory_reserve=0.0, as_fast=0.0
    )
    score = make_score(problem)
    return score(PLANNERS[planner](problem, score))


def faster() -> Iterator[Claim]:
    """Over data parallelism, PipeDream's plans and GPipe: the most of three models each."""
    settings = {
        "10 GB/s": (10e9, 1),
        "4 batches": (10e9, 4),
        "3 GB/s": (3e9, 1),
        "1.25 GB/s": (1.25e9, 1),
    }
    for baseline in BASELINES:
        found = {
            name: {m: gain(m, baseline, slower_links(rate), times) for m in MODELS}
            for name, (rate, times) in settings.items()
        }
        first, *others = found
        models = ", ".join(f"{model} {ratio:.2f}x" for model, ratio in found[first].items())
        yield Claim(
            PAPER,
            f"over `{baseline}`, the most",
            f"8 V100, 10 GB/s, a profiled batch for each; {models}",
            BAPIPE_FASTER,
            max(found[first].values()),
            varied={name: max(found[name].values()) for name in others},
        )


def gain(model: str, baseline: str, cluster: Cluster, times: int) -> float:
    """BaPipe's speed over a baseline's; 0 where that has no plan."""
    try:
        return iteration_s(model, baseline, cluster, times) / iteration_s(
            model, "bapipe", cluster, times
        )
    except Infeasible:
        return 0.0


def deeper() -> Iterator[Claim]:
    """The largest model in a pipeline, over the largest by each baseline on as many devices.

    Data parallelism has the whole model on each device. GPipe keeps something of all micro-batches
    of an iteration, and PipeDream several versions of the weights.
    """
    whole = most_layers(1, 1)
    setting = f"BERT with recompute, 4 V100, {MICRO_BATCHES} micro-batches of one sample"

    def over(schedule: str, devices: int, recompute: bool = True) -> float:
        ours, other = (
            most_layers(devices, 1, name, MICRO_BATCHES, recompute) for name in ("1f1b", schedule)
        )
        return ours / other

    yield Claim(
        PAPER,
        "memory reduction: depth that fits, over that of data parallelism",
        setting,
        BAPIPE_DEEPER,
        most_layers(4, 1) / whole,
        by_construction=True,
        varied={f"{count} V100": most_layers(count, 1) / whole for count in (8, 2)},
    )
    for schedule in ("gpipe", "pipedream"):
        yield Claim(
            PAPER,
            f"memory reduction: depth that fits, over that of `{schedule}`",
            setting,
            BAPIPE_DEEPER,
            over(schedule, 4),
            varied={
                "8 V100": over(schedule, 8),
                "2 V100": over(schedule, 2),
                "4 V100, no recompute": over(schedule, 4, recompute=False),
            },
        )
