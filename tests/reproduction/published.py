"""The published profiles that the reproductions read, and how their papers used them."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from penstock.cluster.toml_file import find_cluster
from penstock.plan.problem import PlanningProblem
from penstock.planning.planning_problem import planning_problem
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
