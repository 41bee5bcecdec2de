"""Planning with tensor groups: they are chosen where they are faster, and only there."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.errors import BadInput, Infeasible
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.problem import planning_problem
from penstock.planners.search.search import PLANNERS
from penstock.planners.tensor_groups import (
    grouped_cluster,
    groupings,
    on_groups,
    plan_with_groups,
    profile_on,
)
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    TensorParallelCosts,
)
from penstock.simulate.score import make_score
from penstock.simulate.simulation import Prediction, simulate_plan

MS, MB = 1e-3, 1e6


def large_block(parameter_mb: float = 100) -> ModelProfile:
    """A block that a group divides whole, and a head that no group divides."""

    def layer(name: str, ms: float, parameters: float) -> LayerCost:
        half = Affine(0.0, ms * MS)
        return LayerCost(name, half, half, half, int(parameters * MB), 0, Affine(0.0, 8 * MB))

    sent = Affine(0.0, 1 * MB)
    return ModelProfile(
        "large block",
        (layer("block", 40, parameter_mb), layer("head", 10, 1)),
        (Edge(0, 1, "x", sent, sent),),
        batch_size=2,
        tensor_parallel=TensorParallelCosts((1.0, 0.0), (4, 0), (4 * MB, 0)),
    )


def host_of(devices: int, rate: float = 100e9, memory_bytes: float = 8e9) -> Cluster:
    gpus = (Device("gpu", memory_bytes),) * devices
    return Cluster("one host", (Host("a", gpus, rate, 0.0, 1e-6),))


def problem_of(
    cluster: Cluster, profile: ModelProfile | None = None, batch: int = 2, size: int = 2
) -> PlanningProblem:
    return planning_problem(
        profile or large_block(), cluster, batch, micro_batch_size=size, planner="search"
    )


search = PLANNERS["search"]


def predicted(plan: Plan, problem: PlanningProblem) -> Prediction:
    """The prediction on the plan's groups as devices."""
    plan, own = on_groups(plan, problem)
    return simulate_plan(replace(plan, tensor_groups=()), own.profile, own.cluster)


def without_groups(problem: PlanningProblem) -> Plan:
    return search(problem, make_score(problem))


def test_two_replicas_of_a_group_beside_a_plain_stage_are_chosen_where_links_are_fast() -> None:
    problem = problem_of(host_of(5), batch=16)
    best = plan_with_groups(problem, (2,), search)
    without = without_groups(problem)
    alone = make_score(problem)(without)
    assert best.tensor_groups == ((0, 1), (2, 3), (4,))
    assert [len(stage.devices) for stage in best.stages] == [2, 1]
    assert [len(best.ranks_of(s.devices[0])) for s in best.stages] == [2, 1]
    assert len(best.ranks) == 5
    # Two samples are at most two replicas, so no plan without groups keeps five devices busy.
    assert predicted(best, problem).iteration_s < 0.92 * alone


def test_groups_are_not_chosen_where_links_are_slow() -> None:
    problem = problem_of(host_of(5, rate=50e6), batch=16)
    best = plan_with_groups(problem, (2, 4), search)
    assert best == without_groups(problem) and not best.tensor_groups


def test_groups_are_chosen_where_the_parameters_fit_on_no_single_device() -> None:
    # Four times the parameters with Adam: 8 GB whole, 4 GB on each of two ranks.
    problem = problem_of(host_of(3, memory_bytes=6e9), large_block(2000))
    with pytest.raises(Infeasible):
        without_groups(problem)
    best = plan_with_groups(problem, (2,), search)
    assert best.tensor_groups and predicted(best, problem).fits
    small = replace(problem, cluster=host_of(3, memory_bytes=4e9))
    with pytest.raises(Infeasible):
        plan_with_groups(small, (2,), search)


def test_costs_of_a_layer_on_a_group_are_its_share_and_its_sums() -> None:
    cluster = host_of(4, rate=1e9)
    profile = large_block()
    found = profile_on(profile, cluster, [[(0, 1)], [(2,)]])
    block, head = found.layers
    # Half of the time, and one direction's two sums of 1 MB each: a ring of two sends each once.
    sums_s = 2 * (2 * 1e-6 + 1 * MB / 1e9)
    assert block.forward_s.at(1) == pytest.approx(20 * MS + sums_s)
    assert block.backward_input_s.at(1) == pytest.approx(20 * MS + sums_s)
    assert block.backward_weight_s.at(1) == pytest.approx(20 * MS)
    assert block.parameter_bytes == profile.layers[0].parameter_bytes / 2
    assert head == profile.layers[1]
    assert profile.tensor_parallel is not None
    measured = replace(profile.tensor_parallel, factors=((2, 1.5),))
    slower = profile_on(replace(profile, tensor_parallel=measured), cluster, [[(0, 1)], [(2,)]])
    block_s, slower_s = (each.backward_input_s.at(2) for each in (block, slower.layers[0]))
    assert slower_s == pytest.approx(1.5 * block_s)
    assert slower.layers[0].backward_weight_s.at(1) == pytest.approx(30 * MS)
    assert slower.layers[0].parameter_bytes == block.parameter_bytes
    assert slower.layers[1] == head
    with pytest.raises(BadInput, match="does not say what a tensor group divides"):
        profile_on(replace(profile, tensor_parallel=None), cluster, [[(0, 1)], [(2,)]])


def test_groups_of_a_plan_may_leave_devices_unused() -> None:
    problem = problem_of(host_of(6))
    stages = Stage(range(1), (1,), (2,)), Stage(range(1, 2), (0,), (2,))
    plan = Plan(stages, 1, 2, "1f1b", tensor_groups=((4,), (1, 2)))
    found, own = on_groups(plan, problem)
    assert [device.kind for device in own.cluster.devices] == [
        "gpu",
        "2 x gpu",
        "gpu",
        "gpu",
        "gpu",
    ]
    assert [stage.devices for stage in found.stages] == [(1,), (3,)]
    assert found.tensor_groups == ((0,), (1, 2), (3,), (4,), (5,))
    with pytest.raises(BadInput, match="groups use rank 4 and cluster 'one host' has 4 devices"):
        on_groups(plan, problem_of(host_of(4)))
    with pytest.raises(BadInput, match="covers 1 layers and profile 'large block' has 2"):
        on_groups(replace(plan, stages=plan.stages[:1]), problem)
    with pytest.raises(BadInput, match="has tensor groups, which only 'penstock simulate', "):
        simulate_plan(plan, problem.profile, problem.cluster)


def test_a_cluster_of_groups_has_their_memory_and_links() -> None:
    small, large = Device("gpu", 4e9), Device("gpu", 8e9, speed=2.0)
    hosts = (
        Host("a", (small, large, small), 100e9, 10e9, 1e-6, 5e-6),
        Host("b", (small, small), 100e9, 10e9, 1e-6, 5e-6),
    )
    cluster = Cluster("two", hosts, (Link(0, 3, 3e9, 1e-5), Link(1, 4, 2e9)))
    found = grouped_cluster(cluster, ((0, 1), (2,), (3, 4)), lambda group: len(group) * 0.9)
    assert [d.speed for d in found.devices] == [1.8, 1.0, 1.8]
    assert [d.memory_bytes for d in found.devices] == [4e9] * 3
    assert [host.port_bytes_per_s for host in found.hosts] == [5e9, 5e9]
    # The slowest of the links between two groups counts; where there is none, the port.
    assert found.bandwidth(0, 2) == 2e9 and found.latency(0, 2) == 1e-5
    # Rank 2 sends to two ranks, each of which sends to it.
    assert found.bandwidth(1, 0) == 50e9 and found.bandwidth(0, 1) == 100e9
    assert found.bandwidth(1, 2) == 5e9


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (((0, 3), (1,), (2,)), "a group needs devices of one host"),
        (((0, 1), (1,), (2, 3)), "do not have each device of cluster"),
        (((2, 3), (0, 1)), "a group needs devices of one host"),
        (((0, 1), (2, 3), (9,)), "do not have each device"),
        (((0, 1), (2, 3)), "has devices of the kinds a, b; its ranks"),
    ],
)
def test_groups_that_cannot_work_are_refused(
    groups: Sequence[tuple[int, ...]], message: str
) -> None:
    hosts = [Host(name, (Device(name, 1e9),) * 2, 1e9, 1e9) for name in ("a", "b")]
    if "kinds" in message:
        hosts[0] = Host("a", (Device("a", 1e9), Device("b", 1e9)), 1e9, 1e9)
    with pytest.raises(BadInput, match=message):
        grouped_cluster(Cluster("two", tuple(hosts)), tuple(groups))


def test_groupings_take_neighbours_of_one_kind_on_one_host() -> None:
    assert list(groupings(host_of(5), (2, 4))) == [
        ((0,), (1,), (2,), (3,), (4,)),
        ((0, 1), (2,), (3,), (4,)),
        ((0, 1), (2, 3), (4,)),
        ((0, 1, 2, 3), (4,)),
    ]
    hosts = tuple(Host(name, (Device("gpu", 1e9),) * 2, 1e9, 1e9) for name in "ab")
    found = list(groupings(Cluster("two", hosts), (2,)))
    assert found[0] == ((0,), (1,), (2,), (3,)) and ((0, 1), (2, 3)) in found
    assert all(group in ((0,), (1,), (2,), (3,), (0, 1), (2, 3)) for way in found for group in way)
    assert len(list(groupings(host_of(64), (2, 4, 8)))) == 24
