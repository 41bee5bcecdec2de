"""One profile and the speeds of devices, from the profiles of several workers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.measure.workers import median_profile, profile_and_speeds
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile


def profile(seconds: float, name: str = "linear") -> ModelProfile:
    cost = Affine(seconds, 2 * seconds)
    layer = LayerCost(name, cost, cost, cost, parameter_bytes=8)
    return ModelProfile(
        "net",
        (layer,),
        batch_size=4,
        step_s_per_byte=seconds,
        stage_forward_s=seconds,
        stage_backward_s=2 * seconds,
        source="here",
    )


def test_one_slow_worker_does_not_move_the_median() -> None:
    merged = median_profile([profile(1.0), profile(50.0), profile(2.0)])
    assert merged.layers[0].forward_s == Affine(2.0, 4.0)
    assert merged.step_s_per_byte == merged.stage_forward_s == 2.0
    assert merged.stage_backward_s == 4.0
    assert merged.layers[0].parameter_bytes == 8
    assert merged.source == "here, 3 workers at once"


def test_profiles_of_different_models_have_no_median() -> None:
    with pytest.raises(BadInput, match="2 different models"):
        median_profile([profile(1.0), profile(1.0, "other")])


def of_layers(device: str, *seconds: float) -> ModelProfile:
    layers = tuple(
        LayerCost(f"layer {index}", Affine(0.0, own_s), Affine(0.0, own_s), Affine(0.0, own_s))
        for index, own_s in enumerate(seconds)
    )
    return ModelProfile("net", layers, batch_size=4, source="here", device=device)


def hosts_of(*kinds: Sequence[str]) -> Cluster:
    return Cluster(
        "measured",
        tuple(
            Host(f"host {number}", tuple(Device(kind, 8e9) for kind in host), 1e9, 1e9)
            for number, host in enumerate(kinds)
        ),
    )


def speeds_in(cluster: Cluster) -> list[float]:
    return [device.speed for device in cluster.devices]


def test_gpus_of_one_kind_are_equal_until_one_is_clearly_slow() -> None:
    cluster = hosts_of(["H100"] * 4)
    ranks = [of_layers("H100", factor, 2 * factor) for factor in (1.1, 1.0, 0.95, 2.5)]
    found, measured = profile_and_speeds(ranks, cluster)
    assert speeds_in(measured) == [1.0, 1.0, 1.0, 0.4]
    # The slow one is planned by its speed, and is not in the median.
    assert found.layers[0].forward_s == Affine(0.0, 1.0)
    # The speeds are relative to this profile's device, so the planners take both.
    assert PlanningProblem(found, measured, 8, (4,)).cluster == measured


def test_of_two_gpus_the_faster_is_usual() -> None:
    ranks = [of_layers("H100", 2.0), of_layers("H100", 1.0)]
    found, measured = profile_and_speeds(ranks, hosts_of(["H100"] * 2))
    assert speeds_in(measured) == [0.5, 1.0]
    assert found.layers[0].forward_s == Affine(0.0, 1.0)


def test_the_profile_is_of_the_most_common_kind_and_others_are_relative_to_it() -> None:
    cluster = hosts_of(["T4"], ["H100", "H100"], ["H200"])
    fast, slow = of_layers("H100", 1.0, 3.0), of_layers("T4", 10.0, 30.0)
    found, measured = profile_and_speeds([slow, fast, fast, of_layers("H200", 0.9, 2.7)], cluster)
    assert (found.device, found.layers) == ("H100", fast.layers)
    # Another kind has its own speed, however little it differs.
    assert speeds_in(measured) == [0.1, 1.0, 1.0, 1.11]
    assert found.notes == ()


def test_layers_count_by_their_seconds_and_what_one_speed_hides_is_said() -> None:
    """Three small layers take as long on both: only their kernels' starts do."""
    usual = of_layers("H100", 0.01, 0.01, 0.01, 1.0, 1.0)
    other = of_layers("T4", 0.01, 0.01, 0.01, 5.0, 10.0)
    found, measured = profile_and_speeds([usual, usual, other], hosts_of(["H100", "H100", "T4"]))
    assert speeds_in(measured) == [1.0, 1.0, 0.2]
    assert found.notes == (
        "layers run on T4 at 0.1 to 0.2 times the speed of H100; all are planned at 0.2",
    )


@pytest.mark.parametrize("loads", [(0.1, 1.2, 0.0, 0.1), (0.1, 1.2)])
def test_a_rank_that_gets_half_of_a_core_has_half_the_speed(loads: tuple[float, ...]) -> None:
    """Others of its host do not wait for cores, so it is not the host that is busy."""
    ranks = [replace(of_layers("cpu", 1.0), other_load=load) for load in loads]
    found, measured = profile_and_speeds(ranks, hosts_of(["cpu"] * len(ranks)))
    assert speeds_in(measured) == [1.0, 0.5, 1.0, 1.0][: len(ranks)]
    assert found.other_load == 0.1


def test_a_host_with_other_programs_is_slower_than_the_others() -> None:
    ranks = [replace(of_layers("cpu", 1.0), other_load=load) for load in (0.1, 0.0, 1.2, 1.2)]
    found, measured = profile_and_speeds(ranks, hosts_of(["cpu"] * 2, ["cpu"] * 2))
    assert speeds_in(measured) == [1.0, 1.0, 0.5, 0.5]
    assert found.other_load == 0.0


def test_cpu_ranks_of_a_host_have_one_speed() -> None:
    alone = [of_layers("cpu", 1.0), of_layers("cpu", 3.0)]
    found, measured = profile_and_speeds(alone, hosts_of(["cpu"] * 2))
    assert speeds_in(measured) == [1.0, 1.0]
    assert found.layers == median_profile(alone).layers
    old = [of_layers("cpu", 4.0), of_layers("cpu", 4.0)]
    _, measured = profile_and_speeds([*alone, *old], hosts_of(["cpu"] * 2, ["cpu"] * 2))
    assert speeds_in(measured) == [1.0, 1.0, 0.5, 0.5]
