"""Moves by hand: what the climbs try next to a plan."""

from dataclasses import replace
from math import inf

import pytest

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.search.judge import judge_of
from penstock.search.neighbours import (
    climb,
    freed_devices,
    joined_stages,
    moves,
    on_unused_devices,
    sets_of,
    split_stages,
    swapped_devices,
)
from penstock.simulate.score import make_score


def problem() -> PlanningProblem:
    """Six equal layers; a host with two fast devices, and one with two slow ones."""
    one = Affine(0.0, 1.0)
    layers = (LayerCost("layer", one, one, one, 10, saved_bytes=Affine(0.0, 10.0)),) * 6
    size = Affine(0.0, 1.0)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(5))
    fast, slow = Device("fast", inf, 2.0), Device("slow", inf, 1.0)
    hosts = (Host("fast", (fast, fast), 1e6, 100.0), Host("slow", (slow, slow), 1e6, 100.0))
    return PlanningProblem(ModelProfile("six", layers, edges), Cluster("two", hosts), 8, (1, 2, 4))


def plan_on(*groups: tuple[int, ...], schedule: str = "1f1b", depths: tuple[int, ...] = ()) -> Plan:
    """Micro-batches of two samples, equally many layers a stage."""
    each = 6 // len(groups)
    stages = tuple(
        Stage(range(s * each, (s + 1) * each), devices, (2 // len(devices),) * len(devices))
        for s, devices in enumerate(groups)
    )
    return Plan(stages, 4, 2, schedule, in_flight_limit=depths)


def test_two_stages_join_on_the_devices_of_both() -> None:
    plan = plan_on((0,), (2,), (1, 3), schedule="early-backward", depths=(4, 3, 1))
    joined = list(joined_stages(problem(), plan))
    # The last two would have three devices for two samples.
    (one,) = joined
    assert one.stages == (Stage(range(4), (0, 2), (1, 1)), plan.stages[2])
    assert one.in_flight_limit == (3, 1)
    assert one in list(moves(problem(), plan))


def test_two_stages_join_on_the_devices_of_one_which_frees_the_others() -> None:
    plan = plan_on((0,), (2,), (1, 3), schedule="early-backward", depths=(4, 3, 1))
    freed = list(freed_devices(problem(), plan))
    groups = [((0,), (1, 3)), ((2,), (1, 3)), ((0,), (2,)), ((0,), (1, 3))]
    assert [other.device_groups for other in freed] == groups
    assert freed[0].stages == (Stage(range(4), (0,), (2,)), plan.stages[2])
    assert freed[3].stages == (plan.stages[0], Stage(range(2, 6), (1, 3), (1, 1)))
    assert [other.in_flight_limit for other in freed] == [(3, 1), (3, 1), (4, 1), (4, 1)]
    assert set(freed) <= set(moves(problem(), plan))


def test_a_stage_is_split_and_half_of_it_goes_to_unused_devices() -> None:
    plan = plan_on((0,), (1,), schedule="early-backward", depths=(3, 1))
    split = list(split_stages(problem(), plan))
    # Of the two unused devices, which are alike, the first is tried.
    groups = [((0,), (2,), (1,)), ((2,), (0,), (1,)), ((0,), (1,), (2,)), ((0,), (2,), (1,))]
    assert [other.device_groups for other in split] == groups
    assert [stage.layers for stage in split[0].stages] == [range(1), range(1, 3), range(3, 6)]
    assert [other.in_flight_limit for other in split] == [(3, 3, 1)] * 2 + [(3, 1, 1)] * 2
    assert set(split) <= set(moves(problem(), plan))
    assert not list(split_stages(problem(), plan_on((0, 1), (2, 3))))
    assert not list(split_stages(replace(problem(), max_stages=2), plan))
    assert list(split_stages(replace(problem(), max_stages=3), plan)) == split


def test_devices_are_replaced_by_as_many_that_are_unused() -> None:
    plan = plan_on((0, 1), (2,))
    replaced = list(on_unused_devices(problem(), plan))
    assert [other.device_groups for other in replaced] == [((0, 1), (3,))]
    assert replaced[0] in set(moves(problem(), plan))
    assert sets_of(problem().cluster, [1, 2], 2) == [(1, 2)]
    assert not sets_of(problem().cluster, [1, 2], 4)
    # Those with links of their own are tried one by one.
    links = tuple(Link(i, j, 10.0) for i in range(4) for j in range(4) if i != j)
    linked = replace(problem(), cluster=replace(problem().cluster, links=links))
    one = plan_on((0,))
    assert [o.devices for o in on_unused_devices(linked, one)] == [(1,), (2,), (3,)]
    assert [o.devices for o in on_unused_devices(problem(), one)] == [(1,), (2,)]


def test_stages_of_a_mirrored_or_looped_plan_neither_join_nor_split() -> None:
    def stage_counts(plan: Plan) -> set[int]:
        return {len(other.stages) for other in moves(problem(), plan)}

    assert stage_counts(plan_on((0,), (1,))) == {1, 2, 3}
    assert stage_counts(plan_on((0,), (1,), schedule="chimera")) == {2}
    assert stage_counts(plan_on((0,), (1,), (0,), (1,), schedule="interleaved")) == {4}


def test_two_sets_of_devices_change_places_unless_they_are_alike() -> None:
    plan = plan_on((0,), (1,), (2,))
    groups = [other.device_groups for other in swapped_devices(problem(), plan)]
    assert groups == [((0,), (2,), (1,))]
    uneven = list(swapped_devices(problem(), plan_on((0,), (2, 3))))
    assert [other.device_groups for other in uneven] == [((2, 3), (0,))]
    assert [stage.slices for stage in uneven[0].stages] == [(1, 1), (2,)]


def test_devices_that_are_alike_change_places_if_they_have_links_of_their_own() -> None:
    links = tuple(Link(i, j, 10.0 + j) for i in range(4) for j in range(4) if i != j)
    linked = replace(problem(), cluster=replace(problem().cluster, links=links))
    groups = [other.device_groups for other in swapped_devices(linked, plan_on((0,), (1,)))]
    assert groups == [((1,), (0,))]


def test_layers_go_with_the_devices_too() -> None:
    stages = (Stage(range(1), (0,), (2,)), Stage(range(1, 6), (2, 3), (1, 1)))
    same, moved = swapped_devices(problem(), Plan(stages, 4, 2, "1f1b"))
    assert [stage.layers for stage in same.stages] == [range(1), range(1, 6)]
    assert [stage.layers for stage in moved.stages] == [range(5), range(5, 6)]
    assert same.device_groups == moved.device_groups == ((2, 3), (0,))


def test_a_climb_joins_stages_and_exchanges_devices_where_that_is_faster() -> None:
    asked = problem()
    score = make_score(asked)
    start = plan_on((2,), (0,), (1,))
    judge = judge_of(asked, score)
    end, end_s = climb(judge, start, judge.simulate(start), 1e6)
    assert end_s == score(end) < score(start)
    assert [stage.devices for stage in end.stages] == [(0, 1), (2, 3)]
    # Four micro-batches: 5 layers of a row each, 3 s a layer, on devices of twice the speed.
    assert end_s == pytest.approx(4 * 5 * 3 / 2, rel=1e-3)
