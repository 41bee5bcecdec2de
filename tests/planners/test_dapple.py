"""DAPPLE's closed form against the simulator, and its search against the recurrence on paper."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from reference.plain_dapple import every_latency_s, plan_latency_s, slides_s

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.core.native import dapple_latency_s, dapple_pivot
from penstock.costs.stage_costs import plan_peaks_bytes
from penstock.costs.tables import whole_chain
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planners.dapple.dapple import Search, dapple_candidates
from penstock.planners.dapple.groups import Groups
from penstock.planners.dapple.placement import POLICIES, occupancies
from penstock.planners.search.search import PLANNERS
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

ROUNDING = 1e-9


def chain(stages: int, forward_s: float, backward_s: float, transfer_s: float) -> ModelProfile:
    """Equal layers of a thousand parameter bytes, a transfer between neighbours."""
    layer = LayerCost("l", Affine(forward_s), Affine(backward_s), Affine(), 1000)
    size = Affine(0.0, transfer_s)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(stages - 1))
    return ModelProfile("chain", (layer,) * stages, edges)


def cluster_of(devices: int) -> Cluster:
    """One byte a second between any two devices."""
    return Cluster("c", (Host("h", (Device("d", 1e9),) * devices, 1.0),))


def straight(stages: int, micro_batches: int) -> Plan:
    """One layer and one device a stage, deeply warmed up."""
    made = tuple(Stage(range(s, s + 1), (s,), (1,)) for s in range(stages))
    return Plan(made, micro_batches, 1, "early-backward")


@given(
    stages=st.integers(1, 6),
    further=st.integers(0, 20),
    ratio=st.sampled_from([1.0, 1.5, 2.0, 2.5]),
    transfer_s=st.sampled_from([0.0, 0.25, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_the_closed_form_is_exact_for_balanced_stages(
    stages: int, further: int, ratio: float, transfer_s: float
) -> None:
    micro_batches = 2 * stages + further
    profile, cluster = chain(stages, 1.0, ratio, transfer_s), cluster_of(stages)
    plan = straight(stages, micro_batches)
    problem = PlanningProblem(profile, cluster, micro_batches, (1,))
    simulated = simulate_plan(plan, profile, cluster)
    assert plan_latency_s(problem, plan) == pytest.approx(simulated.iteration_s, rel=ROUNDING)


def test_the_ending_phase_lets_the_all_reduce_of_late_stages_hide_in_the_drain() -> None:
    forward, backward = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]
    alone = dapple_latency_s(forward, backward, [0.0, 0.0, 0.0], 8)
    assert dapple_latency_s(forward, backward, [0.0, 0.0, 4.0], 8) == alone
    assert dapple_latency_s(forward, backward, [0.0, 0.0, 5.0], 8) == alone + 1
    assert dapple_latency_s(forward, backward, [4.0, 0.0, 0.0], 8) == alone + 4


def test_stages_behind_the_pivot_are_done_before_its_last_backward() -> None:
    # The first stage is the pivot. It ends its last forward after 3 s, and works 7 * 6 s more until
    # its last backward starts. Then stage 1 has just ended its own, and stage 2 ended 2 s earlier.
    forward, backward = [3.0, 1.0, 1.0], [3.0, 2.0, 2.0]
    assert dapple_pivot(forward, backward, 8) == 0
    assert dapple_latency_s(forward, backward, [0.0, 0.0, 0.0], 8) == 3 + 42 + 3
    assert dapple_latency_s(forward, backward, [0.0, 0.0, 10.0], 8) == 3 + 42 - 2 + 10
    assert dapple_latency_s(forward, backward, [0.0, 10.0, 0.0], 8) == 3 + 42 + 10


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=7), st.integers(1, 12))
def test_the_closed_form_is_that_of_the_slides(
    stages: list[tuple[int, int, int]], micro_batches: int
) -> None:
    times = tuple([float(time) for time in part] for part in zip(*stages, strict=True))
    found_s = dapple_latency_s(*times, micro_batches)
    assert found_s == pytest.approx(slides_s(*times, micro_batches), rel=ROUNDING)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(1, 12),
)
def test_policies_take_free_devices_of_their_kind_of_server(
    servers: list[tuple[int, int]], count: int
) -> None:
    free, occupied = zip(*servers, strict=True)
    for policy in POLICIES:
        taken = policy(free, occupied, count)
        kinds = {"fresh_first": lambda used: not used, "append_first": bool}
        if any(occupied):
            kinds["scatter_first"] = bool
        allowed = kinds.get(policy.__name__, lambda used: True)
        room = sum(f for f, used in servers if allowed(used))
        assert (taken is None) == (room < count)
        if taken is not None:
            assert sum(taken) == count
            assert all(0 <= t <= f for t, f in zip(taken, free, strict=True))
            assert all(allowed(used) for t, used in zip(taken, occupied, strict=True) if t)


def test_equal_servers_are_interchangeable() -> None:
    host = Host("h", (Device("d", 1e9),) * 4, 1e9, 1e9)
    equal = Cluster("equal", (host, host))
    unequal = Cluster("unequal", (host, replace(host, port_bytes_per_s=2e9)))
    assert all(a >= b for a, b in occupancies(equal).used)
    assert len(occupancies(equal).used) < len(occupancies(unequal).used)


@pytest.mark.parametrize("planner", ["dapple", "spp"])
@pytest.mark.parametrize(
    ("held", "warm_up", "seconds"),
    [(4.5, (), 85.0), (5.5, (5, 4, 3, 1), 78.0), (6.5, (6, 5, 3, 1), 71.0), (7.5, (), 63.0)],
)
def test_where_memory_does_not_hold_all_of_the_warm_up_it_is_as_deep_as_it_can_be(
    planner: str, held: float, warm_up: tuple[int, ...], seconds: float
) -> None:
    """Four equal stages, K = min(2 (S - i) - 1, D), with transfers of 0.67 of a pass."""
    layer = LayerCost("l", *[Affine(0.0, 1.0)] * 3, saved_bytes=Affine(0.0, 100.0))
    size = Affine(0.0, 1000.0)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(3))
    profile = ModelProfile("chain", (layer,) * 4, edges)
    cluster = Cluster("c", (Host("h", (Device("d", held * 100),) * 4, 1000.0),))
    schedules = ("early-backward", "1f1b")
    problem = PlanningProblem(
        profile, cluster, 16, (1,), schedules=schedules, recompute="off", max_stages=4
    )
    score = make_score(problem)
    plan = PLANNERS[planner](problem, score)
    assert plan.in_flight_limit == warm_up
    assert score(plan) == pytest.approx(seconds)


@given(problems())
@settings(max_examples=40, deadline=None)
def test_candidates_have_the_closed_form_of_their_plan_and_fit(problem: PlanningProblem) -> None:
    first = problem.schedules[0]
    for candidate in dapple_candidates(problem):
        limits = [problem.cluster.devices[d].memory_bytes for d in candidate.plan.devices]
        peaks = plan_peaks_bytes(problem, candidate.plan)
        assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        if candidate.plan.schedule == first:
            own_s = plan_latency_s(problem, candidate.plan)
            assert candidate.estimate_s == pytest.approx(own_s, rel=ROUNDING)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_search_finds_the_least_of_all_plans_of_up_to_three_stages(
    problem: PlanningProblem,
) -> None:
    """With three devices each state has one prefix, so the memo can lose nothing."""
    found_s = min((c.estimate_s for c in dapple_candidates(problem)), default=inf)
    least_s = min(every_latency_s(problem), default=inf)
    assert found_s == pytest.approx(least_s, rel=ROUNDING)


@pytest.mark.parametrize("fixed", [0.4, -0.4])
def test_no_slice_of_a_layer_costs_less_a_row_than_the_search_counts_on(fixed: float) -> None:
    """The largest slice costs the least a row, or where a part is negative a single row does."""
    work = Affine(fixed, 1.0)
    profile = ModelProfile("m", (LayerCost("l", work, work, Affine(), 5),) * 3)
    problem = PlanningProblem(profile, cluster_of(2), 8, (4, 2))
    groups = Groups(problem.cluster, occupancies(problem.cluster, 1.0))
    search = Search(whole_chain(problem), groups, 2, "1f1b")
    least = min(2 * work.at(rows) / rows for rows in range(1, 5))
    assert list(search.least_s) == pytest.approx([0.0, least, 2 * least, 3 * least])


@given(st.lists(st.integers(1, 9), min_size=4, max_size=6), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_the_memo_may_miss_the_least_of_deeper_plans_but_only_just(
    times: list[int], slow: int
) -> None:
    """Where several prefixes lead to a state only that with the best provisional plan stays."""
    layers = tuple(LayerCost(f"l{i}", *[Affine(0.0, t)] * 3, 5) for i, t in enumerate(times))
    size = Affine(0.0, float(slow))
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(len(times) - 1))
    host = Host("h", (Device("d", 1e9),) * 2, 8.0, 2.0)
    profile = ModelProfile("m", layers, edges, batch_size=4)
    problem = PlanningProblem(profile, Cluster("c", (host, host)), 16, (4, 2))
    found_s = min(c.estimate_s for c in dapple_candidates(problem))
    least_s = min(every_latency_s(problem))
    assert least_s * (1 - ROUNDING) <= found_s <= 1.1 * least_s
