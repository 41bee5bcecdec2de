"""In a notebook a value is a line, however much it holds."""

from penstock.cluster.toml_file import find_cluster
from penstock.plan.plan import Plan, Stage
from penstock.profile.find import find_profile
from penstock.simulate.simulation import simulate_plan


def test_large_values_are_shown_in_a_line() -> None:
    cluster, profile = find_cluster("dapple-a"), find_profile("bert-48")
    layers = range(len(profile.layers))
    plan = Plan((Stage(layers, tuple(range(16)), (1,) * 16),), 4, 16, "1f1b")
    prediction = simulate_plan(plan, profile, cluster)
    assert repr(cluster) == "Cluster('dapple-a', 2 hosts, 16 devices)"
    assert repr(profile).startswith("ModelProfile('bert-48', 53 layers, profile published with")
    assert repr(prediction.timeline) == "Timeline('predicted', 16 devices, 1760 events)"
    assert len(repr(prediction)) < 1000
