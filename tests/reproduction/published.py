"""What papers have published: figures, and the profiles that they used."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from penstock.cluster.toml_file import find_cluster
from penstock.plan.problem import PlanningProblem
from penstock.planners.problem import planning_problem
from penstock.profile import built_in
from penstock.profile.built_in import model_from_table
from penstock.profile.find import find_profile
from penstock.profile.model_profile import ModelProfile


@dataclass(frozen=True)
class Published:
    """A built-in model, the batch it was measured with, and the global batch of DAPPLE's table."""

    name: str
    profile_batch: int
    global_batch: int

    def profile(self) -> ModelProfile:
        return as_published(self.name)

    def problem(
        self, cluster: str, micro_batch_size: int = 0, *, text_bytes: bool = False
    ) -> PlanningProblem:
        """With the bytes kept for the backward of the profile, or those of the paper's text."""
        return planning_problem(
            without_norms(find_profile(self.profile().name)) if text_bytes else self.profile(),
            find_cluster(cluster),
            self.global_batch,
            micro_batch_size=micro_batch_size,
            # The papers' planners fill devices, and nothing but time decides.
            memory_reserve=0.0,
            as_fast=0.0,
        )


@cache
def as_published(name: str) -> ModelProfile:
    """A built-in model that keeps for the backward what the published profile says: its outputs.

    The tables are the published profiles to five digits, but for these bytes, which some have from
    the paper's text.
    """
    path = Path(built_in.__file__).parent / "models" / f"{name}.toml"
    text = re.sub(r"(?m)^saved_mb_per_sample = .*\n", "", path.read_text(encoding="utf-8"))
    return without_norms(model_from_table(text, path))


def without_norms(profile: ModelProfile) -> ModelProfile:
    """A profile whose replicas exchange no statistics, as in the systems of the papers.

    In those each replica normalises with the statistics of its own rows.
    """
    layers = tuple(replace(layer, norms=0, norm_channels=0) for layer in profile.layers)
    return replace(profile, layers=layers)


MODELS = {
    "vgg-19": Published("vgg-19", 32, 2048),
    "gnmt-16": Published("gnmt-16", 64, 1024),
    "bert-48": Published("bert-48", 2, 64),
    "xlnet-36": Published("xlnet-36", 1, 128),
    "amoeba-36": Published("amoebanet-36", 1, 128),
    "resnet-50": Published("resnet-50", 128, 2048),
    "vgg-16": Published("vgg-16", 128, 2048),
}
"""ResNet-50 is PipeDream's profile: DAPPLE's is not published."""

TABLE = {
    "resnet-50": ("data-parallel", "data-parallel", "data-parallel"),
    "vgg-19": ("data-parallel", "data-parallel", "15:1"),
    "gnmt-16": ("8:8", "8:8", "straight"),
    "bert-48": ("8:8", "straight", "straight"),
    "xlnet-36": ("8:8", "8:8", "straight"),
    "amoeba-36": ("8:8", "11:5", "11:5"),
}
"""DAPPLE, table V: the form of plan for each model on clusters A, B and C."""

MEAN_LEADS = {"a": 1.71, "b": 1.37, "c": 1.79}
"""Mean speed of the hybrid plan over data parallelism at 128 samples, by cluster."""

MOST_OVER_DATA_PARALLEL = 2.32
OVER_PIPEDREAM = 3.23

ACRS = {
    ("bert-48", "a", 2): 0.06,
    ("bert-48", "b", 16): 0.50,
    ("bert-48", "c", 16): 1.25,
    ("xlnet-36", "a", 2): 0.03,
    ("xlnet-36", "b", 2): 0.03,
    ("xlnet-36", "c", 16): 0.67,
}
"""Communication over compute as printed in table V, by model, cluster and number of stages."""

OVER_GPIPE = 1.60
MEMORY_OF_GPIPES = 0.88
LARGEST_BERT = {1: 48, 2: 106, 4: 215, 8: 428}
"""Layers of the largest BERT that trains with recompute, by number of V100 with 16 GB."""

UTILISATION = {1: 93, 2: 89, 4: 89, 8: 87}
"""Percent of the time that each device computes, with those layers."""

ACR_OF_PLANS = {
    "bert-48": (0.06, 1.25),
    "xlnet-36": (0.03, 0.67),
    "vgg-19": (0.40, 0.40),
    "gnmt-16": (0.10, 3.75),
}
"""The least and the largest value of table V, in a plan of two stages and a straight one."""

PUBLISHED_GAINS = {"bert-48": 1.0, "xlnet-36": 1.02, "vgg-19": 1.1, "gnmt-16": 1.31}
"""DAPPLE: throughput of policy P_B over that of P_A."""

BAPIPE_FASTER, BAPIPE_DEEPER = 3.2, 4.0
"""BaPipe: the most over data- and pipeline-parallel frameworks, in speed and in depth."""

SPP_GAIN = 1.57
"""SPP: the largest gain over the state of the art."""

SPECTRAIN_FASTER = {"data_parallel": 8.91, "no_pipelining": 2.18}
"""SpecTrain: the largest speed-up over data parallelism and over model parallelism."""


@dataclass(frozen=True)
class PublishedRun:
    """A row of the table; none of the figures where it ran out of memory."""

    system: str
    schedule: str
    recompute: bool
    micro_batches: int
    samples_per_s: float | None
    peak_gb: float | None

    @property
    def name(self) -> str:
        return f"{self.system}{' + recompute' * self.recompute}, M = {self.micro_batches}"


RUNS = (
    PublishedRun("GPipe", "gpipe", False, 2, 5.10, 12.1),
    PublishedRun("GPipe", "gpipe", False, 3, None, None),
    PublishedRun("GPipe", "gpipe", True, 2, 4.00, 9.9),
    PublishedRun("GPipe", "gpipe", True, 5, 5.53, 13.2),
    PublishedRun("GPipe", "gpipe", True, 8, None, None),
    PublishedRun("DAPPLE", "1f1b", False, 2, 5.10, 10.6),
    PublishedRun("DAPPLE", "1f1b", False, 8, 7.60, 10.6),
    PublishedRun("DAPPLE", "1f1b", False, 16, 8.18, 10.6),
    PublishedRun("DAPPLE", "1f1b", True, 2, 4.24, 8.5),
    PublishedRun("DAPPLE", "1f1b", True, 8, 6.23, 8.5),
    PublishedRun("DAPPLE", "1f1b", True, 16, 6.77, 8.5),
)
"""DAPPLE's runtime beside GPipe: BERT-48 on two V100."""
