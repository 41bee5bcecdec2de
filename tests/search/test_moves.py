"""Moves by hand: what the climbs try next to a plan."""

from math import inf

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.search.judge import judge_of
from penstock.search.neighbours import climb, joined_stages, moves, swapped_devices
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


def test_stages_of_a_mirrored_or_looped_plan_do_not_join() -> None:
    mirrored = plan_on((0,), (1,), schedule="chimera")
    looped = plan_on((0,), (1,), (0,), schedule="interleaved")
    assert not [*joined_stages(problem(), mirrored), *joined_stages(problem(), looped)]


def test_two_sets_of_devices_change_places_unless_they_are_alike() -> None:
    plan = plan_on((0,), (1,), (2,))
    groups = [other.device_groups for other in swapped_devices(problem(), plan)]
    assert groups == [((0,), (2,), (1,))]
    uneven = list(swapped_devices(problem(), plan_on((0,), (2, 3))))
    assert [other.device_groups for other in uneven] == [((2, 3), (0,))]
    assert [stage.slices for stage in uneven[0].stages] == [(1, 1), (2,)]


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
