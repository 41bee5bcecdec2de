"""A predicted iteration against one that runs, both in CPU seconds: other work does not matter."""

from statistics import mean

from prediction_cases import costs_and_steps, two_replicas

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.runtime.processes.launch import launch_workers
from penstock.simulate.simulation import simulate_plan


def test_replicas_with_batch_norm_take_what_is_predicted_within_a_factor_of_two() -> None:
    ranks = launch_workers(costs_and_steps, (), workers=2, threads=1)
    predicted_s: list[float] = []
    for profile, sum_s in (costs for before_and_after, _ in ranks for costs in before_and_after):
        assert sum(layer.norms for layer in profile.layers) == 9
        # An all-reduce of two ranks takes the latency of two messages.
        host = Host("host", (Device("cpu", 1e9),) * 2, 1e12, link_latency_s=sum_s / 2)
        plan, cluster = two_replicas(len(profile.layers)), Cluster("two", (host,))
        predicted_s.append(simulate_plan(plan, profile, cluster).iteration_s)
    measured_s = mean(step_s for _, step_s in ranks)
    assert mean(predicted_s) / 2 < measured_s < 2 * mean(predicted_s)
