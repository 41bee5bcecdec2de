"""The published profiles that the reproductions read, and how their papers used them."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.cluster.presets import find_cluster
from penstock.plan.problem import PlanningProblem
from penstock.planning.questions import planning_problem
from penstock.profile.model_profile import ModelProfile
from penstock.profile.pipedream_text import read_pipedream

FOLDER = Path(__file__).parents[3] / "shared" / "profiles"

needs_profiles = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the published profiles are not at {FOLDER}"
)


@dataclass(frozen=True)
class Published:
    """A profile's file, the batch it was measured with, and the global batch of DAPPLE's table."""

    file: str
    profile_batch: int
    global_batch: int

    def profile(self) -> ModelProfile:
        return read_pipedream(FOLDER / self.file, self.profile_batch)

    def problem(self, cluster: str, micro_batch_size: int = 0) -> PlanningProblem:
        return planning_problem(
            self.profile(),
            find_cluster(cluster),
            self.global_batch,
            micro_batch_size=micro_batch_size,
            # The papers' planners fill devices, and nothing but time decides.
            memory_reserve=0.0,
            as_fast=0.0,
        )


MODELS = {
    "vgg-19": Published("dapple/vgg-19-pbs-32.txt", 32, 2048),
    "gnmt-16": Published("dapple/gnmt-16-pbs-64.txt", 64, 1024),
    "bert-48": Published("dapple/bert-48-pbs-2.txt", 2, 64),
    "xlnet-36": Published("dapple/xlnet-36-pbs-1.txt", 1, 128),
    "amoeba-36": Published("dapple/amoeba-36-pbs-1.txt", 1, 128),
    "resnet-50": Published("pipedream/resnet50.txt", 128, 2048),
    "vgg-16": Published("pipedream/vgg16.txt", 128, 2048),
}
"""ResNet-50 is PipeDream's profile: DAPPLE's is not published."""
