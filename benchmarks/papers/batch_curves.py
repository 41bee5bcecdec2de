"""DAPPLE's curves: speed of the hybrid plan and of data parallelism against the batch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from claim import Claim
from dapple import PAPER, problem_for, without_overlap_s

from penstock.cluster.toml_file import find_cluster
from penstock.planners.dapple.dapple import dapple
from penstock.planners.data_parallel import data_parallel
from penstock.simulate.score import make_score

BATCHES = {
    "resnet-50": (512, 1024, 2048, 4096),
    "vgg-19": (512, 1024, 2048, 4096),
    "gnmt-16": (256, 512, 1024, 2048),
    "bert-48": (32, 64, 128, 256),
    "xlnet-36": (32, 64, 128, 256),
    "amoeba-36": (64, 128, 256, 512),
}
CLUSTERS = "abc"
LINES = ("hybrid", "overlapped", "plain")


@dataclass(frozen=True)
class Curves:
    """Speed over one device by batch, of a model on a cluster of 16 devices."""

    model: str
    cluster: str
    batches: tuple[int, ...]
    hybrid: tuple[float, ...]
    overlapped: tuple[float, ...]
    plain: tuple[float, ...]


def batch_curves() -> list[dict[str, Any]]:
    """The curves of six models on three clusters."""
    return [asdict(curves_of(model, config)) for model in BATCHES for config in CLUSTERS]


def curves_of(model: str, config: str) -> Curves:
    """One panel."""
    speeds: dict[str, list[float]] = {name: [] for name in LINES}
    for batch in BATCHES[model]:
        problem = problem_for(model, find_cluster(f"dapple-{config}"), batch)
        score = make_score(problem)
        layers = problem.profile.layers
        alone_s = sum(layer.forward_s.at(batch) + layer.backward_s.at(batch) for layer in layers)
        speeds["hybrid"].append(alone_s / score(dapple(problem, score)))
        speeds["overlapped"].append(alone_s / score(data_parallel(problem, score)))
        speeds["plain"].append(alone_s / without_overlap_s(model, config, batch))
    return Curves(model, config, BATCHES[model], *(tuple(found) for found in speeds.values()))


def curve_claims(curves: list[dict[str, Any]]) -> Iterator[Claim]:
    """Claims of the paper about its curves, counted."""
    leads = [[h / d for h, d in zip(c["hybrid"], c["overlapped"], strict=True)] for c in curves]
    plain = [[h / d for h, d in zip(c["hybrid"], c["plain"], strict=True)] for c in curves]
    setting = "six models on A, B and C, four batches each"

    def catching_up(found: list[list[float]]) -> int:
        return sum(lead[-1] <= lead[0] * 1.01 for lead in found)

    yield Claim(
        PAPER,
        "curves on which data parallelism catches up as the batch grows",
        setting,
        len(curves),
        catching_up(leads),
        unit=f"of {len(curves)}",
        varied={"no overlap in the baseline": catching_up(plain)},
    )
    resnet = [lead for c, lead in zip(curves, leads, strict=True) if c["model"] == "resnet-50"]
    yield Claim(
        PAPER,
        "clusters on which data parallelism is best for ResNet-50",
        "2,048 samples",
        len(resnet),
        sum(lead[2] <= 1.01 for lead in resnet),
        unit=f"of {len(resnet)}",
    )
