"""What is said where nothing fits: true, least, and soon enough."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from planning_strategies import problems

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import find_cluster
from penstock.costs.infeasible import infeasible
from penstock.costs.leanest import LeanestSearch, leanest
from penstock.costs.stage_costs import plan_peaks_bytes
from penstock.costs.tables import whole_chain
from penstock.errors import Infeasible
from penstock.plan.problem import PlanningProblem
from penstock.planners.dynamic_program import plans_of_table, table_of
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.planners.search.search import PLANNERS
from penstock.profile.find import find_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_the_leanest_plan_exists_where_the_exact_table_has_one(problem: PlanningProblem):
    costs = whole_chain(problem)
    plan = leanest(problem, costs)
    schedule = "1f1b" if "1f1b" in problem.schedules else problem.schedules[0]
    order = tuple(range(len(problem.cluster.devices)))
    table = table_of(costs, order, min(problem.micro_batch_sizes), schedule)
    fewest = min((len(found.plan.stages) for found in plans_of_table(table)), default=0)
    assert (len(plan.stages) if plan else 0) == fewest
    if plan:
        memories = [problem.cluster.devices[device].memory_bytes for device in plan.devices]
        assert all(p <= m for p, m in zip(plan_peaks_bytes(problem, plan), memories, strict=True))
        assert make_score(problem)(plan) < inf


def test_a_plan_is_found_where_a_stage_must_be_shorter_than_it_could_be():
    # The last device could hold three layers. Then the second could hold none before them, since
    # the first layer fits on the first device alone. With one layer on the last device all fits.
    half = Affine(0.0, 0.5)
    layers = tuple(
        LayerCost(
            f"layer {i}",
            *(half,) * 3,
            parameter_bytes=2 if i == 0 else 0,
            saved_bytes=Affine(0.0, 1.0 if i == 3 else 0.5),
            workspace_bytes=half,
        )
        for i in range(4)
    )
    edges = tuple(Edge(i, i + 1, "x", half, half) for i in range(3))
    devices = tuple(Device("gpu", memory) for memory in (11.0, 8.0, 9.0))
    problem = PlanningProblem(
        ModelProfile("four layers", layers, edges, batch_size=8),
        Cluster("three", (Host("host", devices, 1e12, 1e12),)),
        global_batch=4,
        micro_batch_sizes=(1,),
        recompute="off",
        schedules=("gpipe",),
    )
    plan = leanest(problem, whole_chain(problem))
    assert plan is not None
    assert len(plan.stages) == 3
    assert make_score(problem)(plan) < inf


def with_hosts(problem: PlanningProblem, more: int) -> PlanningProblem:
    """The problem with ``more`` hosts like the last one."""
    cluster = problem.cluster
    hosts = (*cluster.hosts, *(cluster.hosts[-1],) * more)
    return replace(problem, cluster=Cluster(cluster.name, hosts))


def test_the_device_count_that_is_named_is_the_least_that_fits():
    problem = planning_problem(
        find_profile("bert-32"),
        find_cluster("small-memory"),
        64,
        memory_reserve=0.0,
        recompute="stage",
    )
    message = str(infeasible(problem, "search"))
    assert "use >= 16 devices or use devices with 6.118 GB" in message
    enough, too_few = with_hosts(problem, 2), with_hosts(problem, 1)
    assert len(enough.cluster.devices) == 16
    assert make_score(enough)(PLANNERS["dynamic-program"](enough, make_score(enough))) < inf
    with pytest.raises(Infeasible):
        PLANNERS["dynamic-program"](too_few, make_score(too_few))


def test_recompute_by_block_needs_fewer_devices_and_the_message_says_so():
    problem = planning_problem(
        find_profile("bert-32"), find_cluster("small-memory"), 64, memory_reserve=0.0
    )
    with pytest.raises(Infeasible, match="use >= 12 devices or use devices with 4\\.299 GB"):
        find_plan(problem, "dynamic-program", make_score(problem))
    enough = with_hosts(problem, 1)
    plan = find_plan(enough, "dynamic-program", make_score(enough))
    assert any(stage.by_block for stage in plan.stages)
    assert make_score(enough)(plan) < inf
    kept = replace(enough, blocks="no")
    with pytest.raises(Infeasible, match="allow recompute by block"):
        find_plan(kept, "dynamic-program", make_score(kept))


def test_a_model_of_which_no_layer_fits_is_not_answered_with_more_devices():
    big = LayerCost("big", Affine(0, 1), Affine(0, 1), Affine(0, 1), 8 * 10**9)
    profile = ModelProfile("big", (big,) * 4)
    problem = planning_problem(profile, find_cluster("dapple-a"), 16, memory_reserve=0.0)
    message = str(infeasible(problem, "search"))
    assert "use devices with 32" in message
    assert ">=" not in message


def test_a_planner_of_one_stage_is_answered_with_the_planner_that_cuts():
    problem = planning_problem(
        find_profile("bert-48"),
        find_cluster("small-memory"),
        64,
        memory_reserve=0.0,
        recompute="stage",
    )
    for name in ("data-parallel", "single-device"):
        with pytest.raises(Infeasible, match=r"all layers on one device need 13\.68 GB.*'search'"):
            PLANNERS[name](problem, make_score(problem))
    assert "5 stages with micro-batches of 1 would" in str(
        infeasible(replace(problem, recompute="off"), "gpipe")
    )


def hungry(layers: int) -> ModelProfile:
    """Layers of 40 to 280 GB each."""
    return ModelProfile(
        "hungry",
        tuple(
            LayerCost(
                f"layer{i}",
                Affine(0, 1e-3),
                Affine(0, 1e-3),
                Affine(0, 1e-3),
                40 * 10**9 * (1 + i % 7),
                saved_bytes=Affine(0, 1e9),
            )
            for i in range(layers)
        ),
    )


@pytest.mark.parametrize(
    ("cluster", "micro_batch_size", "most"),
    [
        ("dapple-a", 0, 800),
        pytest.param("dapple-a", 16, 11_000, marks=pytest.mark.slow),
        pytest.param("h100-pod-1024", 0, 1800, marks=pytest.mark.slow),
    ],
)
def test_the_answer_comes_soon(
    cluster: str, micro_batch_size: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    """Windows of one width are looked at 624, 8,879 and 1,456 times: 0.01 to 0.2 s."""
    asked: list[None] = []
    runs_that_fit = LeanestSearch.runs_that_fit

    def counted(*arguments: Any) -> Any:
        asked.append(None)
        return runs_that_fit(*arguments)

    monkeypatch.setattr(LeanestSearch, "runs_that_fit", counted)
    problem = planning_problem(
        hungry(100), find_cluster(cluster), 1024, micro_batch_size=micro_batch_size
    )
    assert "use devices with" in str(infeasible(problem, "search"))
    assert 0 < len(asked) <= most


def test_a_schedule_that_planners_do_not_know_is_named_with_what_would_fit() -> None:
    # Each device holds its own half; twice the model, as `chimera` needs it, fits nowhere.
    second = Affine(0.0, 1.0)
    layers = tuple(LayerCost(f"layer {i}", *(second,) * 3, parameter_bytes=2) for i in range(2))
    problem = PlanningProblem(
        ModelProfile("two layers", layers, (Edge(0, 1, "x", second, second),), batch_size=8),
        Cluster("two", (Host("host", (Device("gpu", 9.0),) * 2, 1e12, 1e12),)),
        global_batch=4,
        micro_batch_sizes=(1,),
        schedules=("chimera",),
    )
    with pytest.raises(Infeasible, match=r"under schedule chimera, though 2 stages .* '1f1b'"):
        PLANNERS["search"](problem, make_score(problem))


def test_a_schedule_that_splits_backwards_is_told_what_would_fit_by_block() -> None:
    asked = planning_problem(
        find_profile("bert-32"), find_cluster("small-memory"), 64, schedule="v-min"
    )
    assert asked.blocks == "allowed"
    assert "use >= 12 devices" in str(infeasible(asked, "search"))
