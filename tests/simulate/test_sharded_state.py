"""Replicas that divide the optimizer's state need less memory, and no more time."""

from penstock.cluster.toml_file import find_cluster
from penstock.plan.plan import Plan, Stage
from penstock.profile.find import find_profile
from penstock.simulate.simulation import simulate_plan


def test_state_is_divided_by_the_replicas_of_each_stage() -> None:
    profile = find_profile("bert-48")
    cluster = find_cluster("dapple-a")
    last = len(profile.layers)
    stages = (Stage(range(6), (0, 1, 2), (2, 1, 1)), Stage(range(6, last), (3,), (4,)))
    plan = Plan(stages, 4, 4, "1f1b")
    whole = simulate_plan(plan, profile, cluster)
    divided = simulate_plan(plan, profile, cluster, shard_optimizer=True)
    assert divided.iteration_s == whole.iteration_s
    pairs = zip(whole.peak_memory_bytes, divided.peak_memory_bytes, strict=True)
    saved = [before - after for before, after in pairs]
    moments = 2.0 * profile.parameter_bytes(range(6))
    assert [round(bytes) for bytes in saved] == [round(moments * 2 / 3)] * 3 + [0] * (
        len(saved) - 3
    )
