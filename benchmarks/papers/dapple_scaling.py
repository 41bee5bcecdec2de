"""DAPPLE's runtime (PPoPP 2021): beside GPipe, deeper warm-up, and strong and weak scaling."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from claim import Claim
from dapple import PAPER, problem_for, without_overlap_s
from reproduction.dapple_runtime import mean_peak_gib, play, samples_per_s
from reproduction.published import (
    ACR_OF_PLANS,
    LARGEST_BERT,
    MEMORY_OF_GPIPES,
    OVER_GPIPE,
    PUBLISHED_GAINS,
    UTILISATION,
)
from reproduction.warm_up_depth import simulated_gain

from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import find_cluster
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import Planner
from penstock.planners.dapple.dapple import dapple
from penstock.planners.data_parallel import data_parallel
from penstock.profile import built_in
from penstock.profile.built_in import model_from_table
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.score import make_score
from penstock.simulate.simulation import Prediction, simulate_plan

STRONG = {"gnmt-16": 2048, "bert-48": 128, "xlnet-36": 128, "amoeba-36": 256}
"""Samples of an iteration in the experiment with 2 to 16 devices of cluster A."""

KEEPS_SCALING = 1.5
"""Speed on two servers over that on one."""


def scaling_claims(quick: bool) -> Iterator[Claim]:
    """All claims; few of them with ``quick``."""
    yield from over_gpipe()
    yield from deeper_warm_up()
    if not quick:
        yield from strong_scaling()
    yield from largest_models((1,) if quick else tuple(LARGEST_BERT))
    yield from utilisations()


def over_gpipe() -> Iterator[Claim]:
    """BERT-48 on two devices, each with the most micro-batches that fit."""
    gpipe, ours = play("gpipe", False, 2), play("1f1b", False, 16)
    setting = "BERT-48, two V100; 16 micro-batches against 2; times are a line through these rows"
    yield Claim(
        PAPER,
        "throughput over GPipe's",
        setting,
        OVER_GPIPE,
        samples_per_s(ours, 16) / samples_per_s(gpipe, 2),
        by_construction=True,
    )
    yield Claim(
        PAPER,
        "memory over GPipe's",
        "BERT-48, two V100; 16 micro-batches against 2; GPipe's memory is an input",
        MEMORY_OF_GPIPES,
        mean_peak_gib(ours) / mean_peak_gib(gpipe),
    )


def deeper_warm_up() -> Iterator[Claim]:
    """Policy P_B over P_A. The paper does not name the plan, so several of table V are tried."""
    for model, published in PUBLISHED_GAINS.items():
        least, largest = ACR_OF_PLANS[model]
        yield Claim(
            PAPER,
            "deeper warm-up (P_B over P_A)",
            f"{model}, 2 stages, ACR {least:g}",
            published,
            simulated_gain(2, least),
            varied={f"16 stages, ACR {largest:g}": simulated_gain(16, largest)},
            assumed="a plan of two stages",
        )


def strong_scaling() -> Iterator[Claim]:
    """The hybrid scales past one server; data parallelism flattens or drops."""
    hybrid = {model: gain_of_a_server(model, dapple) for model in STRONG}
    baseline = {model: gain_of_a_server(model, data_parallel) for model in STRONG}
    plain = {
        model: without_overlap_s(model, "a", batch, 8) / without_overlap_s(model, "a", batch)
        for model, batch in STRONG.items()
    }
    models = "models that gain more than half from 8 to 16 devices"
    for what, gains, published, others in (
        ("the hybrid", hybrid, len(STRONG), {}),
        ("data parallelism", baseline, 0, {"no overlap in the baseline": plain}),
    ):
        yield Claim(
            PAPER,
            f"strong scaling: {models}, {what}",
            "A; " + ", ".join(f"{model} {gain:.2f}x" for model, gain in gains.items()),
            published,
            count_that_scale(gains),
            unit="of 4",
            varied={name: count_that_scale(found) for name, found in others.items()},
        )


def count_that_scale(gains: dict[str, float]) -> int:
    """The number of those that gain enough."""
    return sum(gain > KEEPS_SCALING for gain in gains.values())


def gain_of_a_server(model: str, planner: Planner) -> float:
    """Speed on two servers of cluster A over that on one."""
    cluster = find_cluster("dapple-a")
    seconds: list[float] = []
    for servers in (1, 2):
        part = replace(cluster, hosts=cluster.hosts[:servers])
        problem = problem_for(model, part, STRONG[model])
        score = make_score(problem)
        seconds.append(score(planner(problem, score)))
    return seconds[0] / seconds[1]


def largest_models(counts: tuple[int, ...]) -> Iterator[Claim]:
    """The most layers of BERT that fit, with recompute, on each number of devices."""
    for devices in counts:
        yield Claim(
            PAPER,
            "layers of the largest BERT",
            f"{devices} V100 of 16 GB, recompute, Adam, micro-batches of 2",
            LARGEST_BERT[devices],
            most_layers(devices, 2),
            unit="",
            varied={"micro-batches of 1": most_layers(devices, 1)},
            assumed="micro-batches of 2",
        )


def utilisations() -> Iterator[Claim]:
    """Utilisation of devices with the published layers; the micro-batches are not known."""
    for devices, published in UTILISATION.items():
        shares = {
            count: 100 * (1 - bert_prediction(LARGEST_BERT[devices], devices, 2, count).bubble)
            for count in (64, 16, 32, 128)
        }
        yield Claim(
            PAPER,
            "utilisation with the largest BERT",
            f"{LARGEST_BERT[devices]} layers on {devices} V100, recompute, 64 micro-batches of 2",
            published,
            shares.pop(64),
            unit="%",
            varied={f"{count} micro-batches": share for count, share in shares.items()},
            assumed="64 micro-batches" if devices > 1 else "",
        )


def most_layers(
    devices: int,
    samples: int,
    schedule: str = "1f1b",
    micro_batches: int = 0,
    recompute: bool = True,
) -> int:
    """By halving: memory grows with the layers. 0 micro-batches: twice as many as devices."""
    count = micro_batches or 2 * devices
    least, most = devices, 1024
    while most - least > 1:
        middle = (least + most) // 2
        if bert_prediction(middle, devices, samples, count, schedule, recompute).fits:
            least = middle
        else:
            most = middle
    return least


def bert_prediction(
    layers: int,
    devices: int,
    samples: int,
    micro_batches: int,
    schedule: str = "1f1b",
    recompute: bool = True,
) -> Prediction:
    """BERT of this depth on this number of devices of one server."""
    profile = bert_with(layers)
    cluster = find_cluster("dapple-a")
    host = replace(cluster.hosts[0], devices=cluster.hosts[0].devices[:devices])
    before = next(i for i, layer in enumerate(profile.layers) if layer.name.endswith(" layer"))
    cuts = (before + round(layers / devices * k) for k in range(1, devices))
    bounds = [0, *cuts, len(profile.layers)]
    stages = tuple(
        Stage(range(lo, hi), (k,), (samples,), recompute=recompute)
        for k, (lo, hi) in enumerate(pairwise(bounds))
    )
    plan = Plan(stages, micro_batches, samples, schedule)
    return simulate_plan(plan, profile, Cluster("one server", (host,)))


@cache
def bert_with(layers: int) -> ModelProfile:
    """BERT-48 with another number of its equal layers, and as many bytes kept for each."""
    path = Path(built_in.__file__).parent / "models" / "bert-48.toml"
    text = path.read_text(encoding="utf-8").replace("layer*48", f"layer*{layers}")
    kept_mb = 3473 * layers / 48
    text = text.replace("saved_mb_per_sample = 3473", f"saved_mb_per_sample = {kept_mb:.0f}")
    return model_from_table(text, path)
