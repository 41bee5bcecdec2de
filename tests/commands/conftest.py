"""A small problem as files, and as the arguments of a command."""

from pathlib import Path

import pytest

from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import write_cluster
from penstock.profile.json_file import write_profile
from penstock.profile.model_profile import ModelProfile


@pytest.fixture
def profile(tmp_path: Path, small_profile: ModelProfile) -> Path:
    write_profile(small_profile, tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.fixture
def cluster(tmp_path: Path, small_cluster: Cluster) -> Path:
    write_cluster(small_cluster, tmp_path / "four.toml")
    return tmp_path / "four.toml"


@pytest.fixture
def problem(profile: Path, cluster: Path) -> list[str]:
    """The arguments that name a profile, a cluster and a batch."""
    return [str(profile), "--cluster", str(cluster), "--batch", "12"]
