"""Scores are the simulator's times, whatever was scored before by the same score."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import clusters, profiles

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.core.native import StageMemory, most_bytes
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.simulate import catalogue as catalogues
from penstock.simulate import score as scores
from penstock.simulate.catalogue import Recent
from penstock.simulate.instances import instances_of
from penstock.simulate.memory import held_while
from penstock.simulate.orders import flatten, orders_of_plan
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

RELATIVE = 1e-12


@st.composite
def varied_plans(draw: st.DrawFn, layers: int, devices: int) -> Plan:
    """Any cuts, replicas with uneven slices, recompute, every schedule, limits in flight."""
    stages = draw(st.integers(1, min(layers, devices, 4)))
    cuts = [0, *sorted(draw(st.permutations(range(1, layers)))[: stages - 1]), layers]
    free = list(draw(st.permutations(range(devices))))
    rows = draw(st.integers(1, 6))
    made: list[Stage] = []
    for index in range(stages):
        most = min(len(free) - (stages - index - 1), rows, 4)
        mine = tuple(free.pop() for _ in range(draw(st.integers(1, most))))
        ends = [0, *sorted(draw(st.permutations(range(1, rows)))[: len(mine) - 1]), rows]
        slices = tuple(hi - lo for lo, hi in pairwise(ends))
        run = range(cuts[index], cuts[index + 1])
        made.append(Stage(run, mine, slices, draw(st.booleans())))
    micro_batches = draw(st.integers(1, 7))
    schedule = draw(st.sampled_from(sorted(FAMILIES)))
    limits: tuple[int, ...] = ()
    if schedule != "gpipe" and draw(st.booleans()):
        limits = tuple(draw(st.integers(1, micro_batches + 1)) for _ in range(stages))
    return Plan(tuple(made), micro_batches, rows, schedule, in_flight_limit=limits)


@st.composite
def many_plans(draw: st.DrawFn) -> tuple[ModelProfile, Cluster, list[Plan]]:
    """Plans of one profile on one cluster, relatives and repetitions among them."""
    profile, cluster = draw(profiles()), draw(clusters())
    count = len(cluster.devices)
    memory = draw(st.sampled_from([1e12, 1e12, 3e8, 2e8]))
    hosts = tuple(
        replace(host, devices=tuple(replace(d, memory_bytes=memory) for d in host.devices))
        for host in cluster.hosts
    )
    ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    pairs = draw(st.sets(ends.filter(lambda pair: pair[0] != pair[1]), max_size=3))
    links = tuple(Link(a, b, 40.0, 0.05) for a, b in sorted(pairs)) if count > 1 else ()
    layers = len(profile.layers)
    plans = draw(st.lists(varied_plans(layers, count), min_size=1, max_size=4))
    for plan in list(plans):
        stages = tuple(replace(s, recompute=not s.recompute) for s in plan.stages)
        plans.append(replace(plan, stages=stages))
        mirrored = tuple(
            replace(s, devices=s.devices[::-1], slices=s.slices[::-1]) for s in plan.stages
        )
        plans.append(replace(plan, stages=mirrored, schedule="1f1b"))
    again = draw(st.permutations(plans + plans))
    return profile, Cluster("drawn", hosts, links), list(again)


def made_score(profile: ModelProfile, cluster: Cluster) -> Score:
    """The score of all plans of a profile on a cluster; the batch plays no part in it."""
    return make_score(PlanningProblem(profile, cluster, 1, (1,)))


def assert_same(profile: ModelProfile, cluster: Cluster, plans: list[Plan]) -> None:
    """One score, plan after plan, gives what simulating each on its own gives."""
    score = made_score(profile, cluster)
    for plan in plans:
        try:
            prediction = simulate_plan(plan, profile, cluster)
        except BadInput:
            with pytest.raises(BadInput):
                score(plan)
            continue
        expected = prediction.iteration_s if prediction.fits else inf
        assert score(plan) == pytest.approx(expected, rel=RELATIVE)


@settings(max_examples=120, deadline=None)
@given(many_plans())
def test_one_score_gives_every_plan_its_simulated_time(
    drawn: tuple[ModelProfile, Cluster, list[Plan]],
) -> None:
    assert_same(*drawn)


@settings(max_examples=40, deadline=None)
@given(many_plans())
def test_it_does_so_too_when_it_forgets_almost_everything_at_once(
    drawn: tuple[ModelProfile, Cluster, list[Plan]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogues, "MOST_SECONDS", 50)
        patch.setattr(catalogues, "MOST_PAIRS", 8)
        patch.setattr(scores, "MOST_ACTIONS", 8)
        assert_same(*drawn)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_orders_written_down_at_once_are_the_valid_ones(data: st.DataObject) -> None:
    """`order_of` validates; the peaks of memory that follow from both are the same."""
    plan = data.draw(varied_plans(6, 6))
    try:
        schedule = order_of(plan)
    except BadInput:
        with pytest.raises(BadInput):
            orders_of_plan(plan)
        return
    instances = instances_of(schedule, plan)
    held = held_while(schedule, instances)
    expected = flatten(schedule, instances, plan.micro_batches, held=held)
    found = orders_of_plan(plan)
    for field in ("start", "words"):
        assert getattr(found, field).tolist() == getattr(expected, field).tolist(), field
    assert found.instances == expected.instances
    numbers = st.integers(0, 5).map(float)
    memory = StageMemory(1.0, data.draw(numbers), data.draw(numbers), 2.0)
    for own, all_of_them, members in zip(found.held, held, instances.members, strict=True):
        memories = (memory,) * len(members)
        assert most_bytes(memories, own) == most_bytes(memories, all_of_them)


def test_what_was_used_lately_is_remembered_within_the_capacity() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return key

    recent = Recent[int, int](capacity=10, weight=lambda answer: 1)
    for key in range(1000):
        assert recent.find(key, lambda key=key: make(key)) == key
        assert recent.find(0, lambda: make(0)) == 0
    assert made == list(range(1000))
    assert len(recent.young) + len(recent.old) <= 20
    recent.find(1, lambda: make(1))
    assert made[-1] == 1


def test_an_answer_heavier_than_the_capacity_is_still_given() -> None:
    recent = Recent[int, str](capacity=1, weight=len)
    assert [recent.find(key, lambda: "heavy") for key in (1, 2, 1)] == ["heavy"] * 3


def test_a_limit_that_gpipe_cannot_keep_is_an_error_in_both() -> None:
    layer = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0))
    size = Affine(1.0, 1.0)
    profile = ModelProfile("two", (layer,) * 2, (Edge(0, 1, "t", size, size),))
    cluster = Cluster("two", (Host("h", (Device("d", 1e9),) * 2, 1e9),))
    stages = (Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,)))
    plan = Plan(stages, 4, 1, "gpipe", in_flight_limit=(4, 2))
    with pytest.raises(BadInput, match="in-flight limit is 2"):
        made_score(profile, cluster)(plan)
