"""The matrices say of every pair what the cluster says of it."""

import pytest
from bound_strategies import bound_problems
from hypothesis import given, settings

from penstock.cluster.cluster import Cluster
from penstock.cluster.link_matrices import link_matrices
from penstock.cluster.toml_file import CLUSTERS, find_cluster
from penstock.plan.problem import PlanningProblem


def check_every_pair(cluster: Cluster) -> None:
    matrices = link_matrices(cluster)
    devices = range(len(cluster.devices))
    for i in devices:
        for j in devices:
            if i != j:
                assert matrices.bytes_per_s[i, j] == cluster.bandwidth(i, j)
                assert matrices.latency_s[i, j] == cluster.latency(i, j)
                assert matrices.uses_port[i, j] == cluster.uses_port(i, j)


@pytest.mark.parametrize("name", [name for name in CLUSTERS if not name.startswith("h100-pod-")])
def test_of_the_presets(name: str):
    check_every_pair(find_cluster(name))


@settings(max_examples=60, deadline=None)
@given(problem=bound_problems())
def test_of_unequal_hosts_with_links_of_their_own(problem: PlanningProblem):
    check_every_pair(problem.cluster)
