"""BaPipe: closed forms against the simulator, the parts of its partition, and what it picks."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduction.published import without_norms

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import find_cluster
from penstock.plan.problem import PlanningProblem
from penstock.planners.bapipe.bapipe import (
    bapipe,
    coarse_cuts,
    inter_layer_cuts,
    memory_fine_tuned,
    methods_for,
    straight_pipelines,
)
from penstock.planners.bapipe.formulas import features_kept, pace_s
from penstock.planners.choice import Candidate
from penstock.planners.data_parallel import data_parallel
from penstock.planners.problem import planning_problem
from penstock.profile.find import find_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

ENOUGH = 1e15


@pytest.mark.parametrize("bandwidth", [0.2, 0.5, 0.9, 1.5])
@pytest.mark.parametrize("feature", [1.0, 3.0])
def test_a_link_keeps_the_pace_if_it_has_the_bandwidth_of_the_table(
    bandwidth: float, feature: float
):
    """The table asks for ``2 a / (F + B)`` under FBP-AS, and for ``a / F`` under 1F1B-AS."""
    times = {"forward_s": 1.0, "backward_s": 2.0, "transfer_s": feature / bandwidth}
    enough = bandwidth >= 2 * feature / (1.0 + 2.0)
    assert (pace_s("fbp-as", **times) == 3.0) == enough
    assert (pace_s("1f1b-as", **times) == 3.0) == (bandwidth >= feature / 1.0)
    if not enough:
        # Two transfers of ``a`` bytes, one of features and one of their gradient.
        assert pace_s("fbp-as", **times) == pytest.approx(2 * feature / bandwidth)


def test_features_kept_are_those_of_the_table():
    assert [features_kept("1f1b-as", stage=s, stages=3) for s in range(3)] == [3, 2, 1]
    assert [features_kept("fbp-as", stage=s, stages=3) for s in range(3)] == [6, 4, 2]


@given(
    speeds=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=4),
    layers=st.integers(16, 40),
)
def test_stage_times_are_within_a_layer_of_their_share(speeds: list[float], layers: int):
    cuts = inter_layer_cuts([1.0] * layers, speeds, range(1, layers))
    for (lo, hi), speed in zip(pairwise(cuts), speeds, strict=True):
        assert abs((hi - lo) - layers * speed / sum(speeds)) <= 1.0


@given(
    times=st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9),
    speeds=st.lists(st.sampled_from([1.0, 5.0]), min_size=1, max_size=5),
)
def test_every_stage_has_a_layer(times: list[float], speeds: list[float]):
    cuts = inter_layer_cuts(times, speeds, range(1, len(times)))
    assert (cuts[0], cuts[-1]) == (0, len(times))
    assert len(cuts) == min(len(speeds), len(times)) + 1
    assert all(lo < hi for lo, hi in pairwise(cuts))


def test_blocks_join_layers_whose_boundary_is_too_wide_for_the_wire():
    transfers_s = [0.0, 9.0, 9.0, 1.0, 2.0, 0.0]
    allowed = coarse_cuts(transfers_s, stage_s=2.5)
    assert allowed == (3, 4)
    assert inter_layer_cuts([1.0] * 5, [1.0, 1.0], allowed) == (0, 3, 5)


def test_fine_tuning_moves_a_layer_from_an_overfull_first_stage_with_the_least_loss():
    layers_bytes, times = [6, 6, 1, 1, 1, 1], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def needed(stage: int, lo: int, hi: int) -> float:
        return (3 - stage) * sum(layers_bytes[lo:hi])

    def busy(stage: int, lo: int, hi: int) -> float:
        return sum(times[lo:hi])

    assert memory_fine_tuned((0, 2, 4, 6), [20, 20, 20], needed, busy) == (0, 1, 4, 6)
    assert memory_fine_tuned((0, 2, 4, 6), [99, 99, 99], needed, busy) == (0, 2, 4, 6)
    assert memory_fine_tuned((0, 2, 4, 6), [5, 5, 5], needed, busy) == ()


def test_an_overfull_first_stage_of_a_plan_is_repaired():
    layers = tuple(
        LayerCost(f"l{i}", Affine(0, 1), Affine(0, 1), Affine(), saved_bytes=Affine(0, 10.0))
        for i in range(6)
    )
    small = Affine(0.0, 1.0)
    edges = tuple(Edge(i, i + 1, f"t{i}", small, small) for i in range(5))
    host = Host("host", (Device("gpu", 80.0),) * 3, link_bytes_per_s=1e9)
    problem = PlanningProblem(
        ModelProfile("m", layers, edges),
        Cluster("three", (host,)),
        8,
        (1,),
        schedules=("early-backward",),
        recompute="off",
    )
    # Two layers on each stage are balanced, but five micro-batches of two layers need 100 bytes.
    score = make_score(problem)
    plan = bapipe(problem, score)
    assert [len(stage.layers) for stage in plan.stages] == [1, 2, 3]
    assert score(plan) < ENOUGH


def on_chips(name: str, mebibytes: float) -> PlanningProblem:
    """BaPipe's own schedules of a model on four boards with chips of a size."""
    cluster = find_cluster("bapipe-vcu118")
    hosts = tuple(
        replace(h, devices=tuple(replace(d, on_chip_bytes=mebibytes * 2**20) for d in h.devices))
        for h in cluster.hosts
    )
    profile = find_profile(name)
    return planning_problem(profile, replace(cluster, hosts=hosts), 128, planner="bapipe")


def pipeline_on_chips(name: str, mebibytes: float) -> tuple[Candidate, float]:
    """Its pipeline with micro-batches of one sample, and the simulated seconds."""
    problem = replace(on_chips(name, mebibytes), micro_batch_sizes=(1,), recompute="off")
    one = replace(problem, schedules=("1f1b-as",))
    (candidate,) = straight_pipelines(one, recompute=False)
    return candidate, make_score(problem)(candidate.plan)


@pytest.mark.parametrize("name", ["resnet-50", "vgg-16"])
@pytest.mark.parametrize("mebibytes", [20, 60, 1000])
def test_reads_of_off_chip_memory_are_in_the_formula(name: str, mebibytes: float):
    candidate, simulated_s = pipeline_on_chips(name, mebibytes)
    assert candidate.estimate_s == pytest.approx(simulated_s, rel=0.15)


@pytest.mark.parametrize(("cluster", "size"), [("vcu118", 2), ("vcu129", 4), ("mixed", 2)])
def test_boards_that_stream_keep_the_time_of_the_formula(cluster: str, size: int):
    """ResNet-50 in four even stages; its messages take less than the passes beside them."""
    profile = find_profile("resnet-50")
    boards = find_cluster(f"bapipe-{cluster}")
    problem = planning_problem(profile, boards, 128, micro_batch_size=size, planner="bapipe")
    one = replace(problem, schedules=("1f1b-as",))
    (candidate,) = straight_pipelines(one, recompute=False)
    published_s = {"vcu118": 0.449, "vcu129": 0.259, "mixed": 0.324}[cluster]
    assert candidate.estimate_s == pytest.approx(published_s, abs=5e-4)
    assert make_score(problem)(candidate.plan) == pytest.approx(published_s, abs=5e-4)


def test_reads_of_off_chip_memory_are_in_the_cuts():
    found = [pipeline_on_chips("resnet-50", mebibytes)[0].plan for mebibytes in (20, 1000)]
    small, large = ([stage.layers.stop for stage in plan.stages] for plan in found)
    assert small != large


@pytest.mark.parametrize("model", ["vgg-16", "resnet-50", "gnmt-8"])
@pytest.mark.parametrize("cluster", ["bapipe-vcu118", "bapipe-vcu129", "bapipe-mixed"])
def test_it_is_never_behind_data_parallelism_by_its_own_simulator(model: str, cluster: str):
    profile = find_profile(model)
    problem = planning_problem(profile, find_cluster(cluster), 128, planner="bapipe")
    score = make_score(problem)
    assert score(bapipe(problem, score)) <= score(data_parallel(problem, score))


def test_only_devices_that_compute_while_they_send_take_the_overlapped_schedule():
    problem = planning_problem(
        find_profile("gnmt-8"), find_cluster("bapipe-gpu-no-overlap"), 128, planner="bapipe"
    )
    assert methods_for(problem) == ("1f1b-sno",)


@pytest.mark.parametrize("transfer_s, schedule", [(0.5, "1f1b-as"), (1.4, "fbp-as")])
def test_fpgas_short_of_bandwidth_take_the_method_that_asks_for_less(
    transfer_s: float, schedule: str
):
    # F = 1, B = 2: 1F1B-AS asks for a / F, FBP-AS for 2 a / (F + B).
    layers = tuple(LayerCost(f"l{i}", Affine(0, 1), Affine(0, 2), Affine()) for i in range(2))
    size = Affine(0.0, transfer_s)
    profile = ModelProfile("m", layers, (Edge(0, 1, "t", size, size),))
    device = Device("board", ENOUGH, concurrent_passes=True)
    host = Host("host", (device,) * 2, link_bytes_per_s=1.0)
    problem = planning_problem(
        profile, Cluster("two", (host,)), 64, micro_batch_size=1, planner="bapipe"
    )
    assert bapipe(replace(problem, max_stages=2), make_score(problem)).schedule == schedule


@pytest.mark.parametrize(
    "cluster, methods",
    [
        ("bapipe-vcu118", ("1f1b-as", "fbp-as")),
        ("bapipe-mixed", ("1f1b-as", "fbp-as")),
        ("bapipe-gpu", ("1f1b-sno", "1f1b-so")),
    ],
)
def test_it_explores_its_own_schedules_for_the_accelerators_there_are(
    cluster: str, methods: tuple[str, ...]
):
    profile = find_profile("vgg-16")
    problem = planning_problem(profile, find_cluster(cluster), 128, planner="bapipe")
    assert methods_for(problem) == methods
    assert bapipe(problem, make_score(problem)).schedule in methods
    other = planning_problem(profile, find_cluster(cluster), 128, schedule="1f1b-as,gpipe,1f1b-so")
    assert methods_for(other) in (("1f1b-as", "gpipe"), ("gpipe", "1f1b-so"))
    alone = planning_problem(profile, find_cluster(cluster), 128, schedule="1f1b-so")
    assert methods_for(alone) == ("1f1b-so",)


@pytest.mark.parametrize(
    "name, pipeline", [("vgg-16", True), ("gnmt-8", True), ("resnet-50", False)]
)
def test_it_picks_data_parallelism_for_resnet_and_pipelines_for_vgg_and_gnmt(
    name: str, pipeline: bool
):
    # Four V100s that reach each other through PCIe at 3 GB/s, a mini-batch of 32 on each.
    host = Host("pcie", (Device("V100-16GB", 16e9),) * 4, 3e9, link_latency_s=10e-6)
    profile = without_norms(find_profile(name))
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    problem = PlanningProblem(profile, Cluster("bapipe", (host,)), 128, sizes)
    plan = bapipe(problem, make_score(problem))
    assert [stage.replicas for stage in plan.stages] == ([1, 1, 1, 1] if pipeline else [4])
