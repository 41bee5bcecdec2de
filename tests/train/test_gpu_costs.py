"""Unequal GPUs, and links between GPUs, measured by worker processes on stand-ins."""

import pytest
from train import gpu_cost_cases as cases

from penstock.runtime.processes.launch import launch_workers

FREE_BYTES = cases.FULL_BYTES - cases.HELD_BYTES


def test_a_job_on_unequal_gpus_is_costed_as_it_computes() -> None:
    costs, *others = launch_workers(cases.costed, (3,), workers=3, threads=1)
    assert others == [None, None]
    profile, cluster = costs.profile, costs.cluster
    assert [device.kind for device in cluster.devices] == list(cases.KINDS)
    assert [device.speed for device in cluster.devices] == pytest.approx([1.0, 1.0, 0.25], rel=0.02)
    assert profile.device == "H100"
    slow = profile.layers[1]
    assert slow.forward_s.at(2) == pytest.approx(200.0, rel=0.02)
    # Another process holds the rest.
    for device in cluster.devices:
        assert 0.99 * FREE_BYTES < device.memory_bytes <= FREE_BYTES


def test_ranks_of_one_gpu_share_what_is_free_of_it() -> None:
    costs, _ = launch_workers(cases.costed, (1,), workers=2, threads=1)
    cluster = costs.cluster
    for device in cluster.devices:
        assert 0.99 * FREE_BYTES / 2 < device.memory_bytes <= FREE_BYTES / 2
    assert cluster.bandwidth(0, 1) > 0


def test_the_gpus_of_a_cluster_are_measured_by_nccl() -> None:
    found, other = launch_workers(cases.cluster_measured, workers=2, threads=1)
    assert [device.kind for device in found.cluster.devices] == ["H100", "H100"]
    assert found.cluster.bandwidth(0, 1) > 0
    assert found == other


def test_a_gpu_that_is_not_the_current_one_is_timed() -> None:
    ((profile, elsewhere, reads),) = launch_workers(
        cases.profile_of_another_gpu, workers=1, threads=1
    )
    assert profile.device == "T4"
    assert profile.layers[1].forward_s.at(4) == pytest.approx(1600.0, rel=0.02)
    assert elsewhere == 0
    # Within a layer's time the host waits for nothing but its end.
    assert reads == ["synchronize"]
