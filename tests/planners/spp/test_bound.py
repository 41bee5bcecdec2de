"""SPP's bound on the list order, on random plans in the simulator."""

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from planning_strategies import problems
from reference.every_plan import every_plan

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.toml_file import find_cluster
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.problem import planning_problem
from penstock.planners.spp.bound import spp_bound_s, workload_s
from penstock.planners.spp.spp import spp
from penstock.profile.find import find_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

INSTANCES = 600
MEGABYTE = 1_000_000


def random_instance(seed: int) -> tuple[PlanningProblem, Plan]:
    """Uneven stages, replicas, links and all-reduces; on one host, on several, or any links."""
    draw = random.Random(seed)
    stages = draw.randint(2, 8)
    replicas = [draw.choice((1, 1, 2, 3)) for _ in range(stages)]
    layers = tuple(
        LayerCost(
            f"layer{i}",
            *(Affine(0.0, draw.uniform(0.01, 1.0)) for _ in range(3)),
            parameter_bytes=draw.choice((0, 5, 60)) * MEGABYTE,
        )
        for i in range(stages)
    )
    edges = tuple(
        Edge(i, i + 1, f"tensor{i}", *(Affine(0.0, draw.uniform(0.0, 1e6)) for _ in range(2)))
        for i in range(stages - 1)
    )
    rows, micro_batches = draw.randint(3, 6), draw.randint(1, 40)
    cluster = random_cluster(draw, sum(replicas))
    profile = ModelProfile("random", layers, edges)
    problem = PlanningProblem(profile, cluster, rows * micro_batches, (rows,))
    order = draw.sample(range(sum(replicas)), sum(replicas))
    made: list[Stage] = []
    for index, count in enumerate(replicas):
        slices = [rows // count + (i < rows % count) for i in range(count)]
        made.append(Stage(range(index, index + 1), tuple(order[:count]), tuple(slices)))
        order = order[count:]
    return problem, Plan(tuple(made), micro_batches, rows, "wavefront")


def random_cluster(draw: random.Random, devices: int) -> Cluster:
    """Links and ports at rates spread over two decades."""

    def rate() -> float:
        return 10 ** draw.uniform(6, 8)

    per_host = draw.choice((devices, 2, 1))
    counts = [min(per_host, devices - first) for first in range(0, devices, per_host)]
    small_chip = {"on_chip_bytes": 30e6, "off_chip_bytes_per_s": 10 ** draw.uniform(7, 9)}
    messages = {"message_s": 10 ** draw.uniform(-3, 0), "message_bytes_per_s": rate()}
    waits = {"overlaps_communication": False}
    kinds = {
        "chip": small_chip,
        "copies": messages,
        "both": small_chip | messages,
        "waits": waits,
        "streams": {"concurrent_passes": True},
    }
    device = Device("device", 1e15, **kinds.get(draw.choice(("", "", "", "", *kinds)), {}))
    hosts = tuple(
        Host(f"host{i}", (device,) * count, rate(), rate(), 0.01, 0.02)
        for i, count in enumerate(counts)
    )
    links = tuple(
        Link(i, j, rate(), 0.01)
        for i in range(devices)
        for j in range(devices)
        if i != j and draw.random() < 0.3
    )
    return Cluster("random", hosts, links)


def test_the_bound_holds_on_random_instances():
    ratios: list[float] = []
    for seed in range(INSTANCES):
        problem, plan = random_instance(seed)
        bound_s = spp_bound_s(problem, plan)
        assert (bound_s < inf) == has_bound(seed)
        ratios.append(make_score(problem)(plan) / bound_s)
    assert max(ratios) <= 1.0
    # It says something: half of the plans come within a factor of 2 (median 1.8).
    assert sorted(ratios)[INSTANCES // 2] > 0.5


def with_slow_messages(cluster: Cluster) -> Cluster:
    """Every message takes two milliseconds of a device."""
    return replace(
        cluster,
        hosts=tuple(
            replace(host, devices=tuple(replace(d, message_s=2e-3) for d in host.devices))
            for host in cluster.hosts
        ),
    )


PRESETS = ("bapipe-gpu", "bapipe-mixed", "bapipe-vcu118", "bapipe-vcu129", "dapple-a", "graph-8")


@pytest.mark.parametrize("model", ["resnet-50", "vgg-16", "gnmt-8"])
@pytest.mark.parametrize("slow_messages", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_the_bound_holds_for_plans_of_published_models(
    name: str, slow_messages: bool, model: str
) -> None:
    """By `spp`, in the list order, with micro-batches of one sample, which read the most."""
    cluster = find_cluster(name)
    problem = planning_problem(
        find_profile(model),
        with_slow_messages(cluster) if slow_messages else cluster,
        128,
        planner="spp",
        micro_batch_size=1,
    )
    problem = replace(problem, schedules=("wavefront",))
    score = make_score(problem)
    plan = spp(problem, score)
    assert score(plan) <= spp_bound_s(problem, plan) * (1 + 1e-9) < inf


def has_bound(seed: int) -> bool:
    return random_instance(seed)[0].cluster.devices[0].overlaps_communication


@pytest.mark.parametrize("seed", list(filter(has_bound, range(24)))[:20])
def test_the_bound_approaches_the_workload_with_many_micro_batches(seed: int):
    problem, plan = random_instance(seed)
    many = replace(plan, micro_batches=10_000)
    rows = plan.micro_batch_size
    longer = replace(problem, global_batch=10_000 * rows)
    step_s = spp_bound_s(longer, many) - workload_s(longer, many)
    waves = 4 * len(plan.stages) - 4
    ending_s = step_s - waves * workload_s(longer, many) / 10_000
    assert spp_bound_s(problem, plan) - ending_s == pytest.approx(
        (plan.micro_batches + waves) * workload_s(longer, many) / 10_000
    )
    assert make_score(problem)(plan) >= max(
        plan.micro_batches * problem.profile.forward_s(stage.layers, min(stage.slices))
        for stage in plan.stages
    )


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (3, 4), (5, 16)])
def test_the_bound_of_a_chain_without_messages_is_that_of_the_theorem(
    stages: int, micro_batches: int
):
    """SPP: ``(1 + (4 S - 4) / M) C``, with ``C`` the busiest stage; no gradients are reduced."""
    times = [1.0 + (s % 2) for s in range(stages)]
    layers = tuple(
        LayerCost(f"layer{i}", Affine(0.0, time), Affine(0.0, time), Affine())
        for i, time in enumerate(times)
    )
    host = Host("host", (Device("device", 1e15),) * stages, 1e9)
    problem = PlanningProblem(
        ModelProfile("chain", layers), Cluster("line", (host,)), micro_batches, (1,)
    )
    made = tuple(Stage(range(s, s + 1), (s,), (1,)) for s in range(stages))
    busiest_s = micro_batches * 2 * max(times)
    assert spp_bound_s(problem, Plan(made, micro_batches, 1, "wavefront")) == pytest.approx(
        (1 + (4 * stages - 4) / micro_batches) * busiest_s
    )


@settings(max_examples=40, deadline=None)
@given(problem=problems(max_layers=3, memory=False))
def test_the_bound_holds_for_every_small_plan(problem: PlanningProblem):
    score = make_score(problem)
    for plan in every_plan(problem, tuple(range(len(problem.cluster.devices)))):
        if plan.micro_batch_size >= max(stage.replicas for stage in plan.stages):
            listed = replace(plan, schedule="wavefront", in_flight_limit=())
            assert score(listed) <= spp_bound_s(problem, listed) * (1 + 1e-9)
