"""Critical paths that can be read off the picture, and of simulated plans."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timelines import TWO_STAGES
from planning_strategies import problems
from reference.every_plan import every_plan
from reproduction.balanced_stages import play_balanced

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import simulate_plan
from penstock.timeline.critical_path import critical_path, seconds_on_path
from penstock.timeline.timeline import Event, Timeline


def words(timeline: Timeline) -> str:
    return " ".join(f"{s.event.kind}{s.event.device}" for s in critical_path(timeline))


def test_it_follows_messages_between_devices() -> None:
    assert words(TWO_STAGES) == "F0 RECV2 F2 B2 RECV0 B0 REDUCE0"
    assert seconds_on_path(critical_path(TWO_STAGES)) == {
        ("F", 0): 1.0,
        ("RECV", 1): 1.0,
        ("F", 1): 1.0,
        ("B", 1): 1.0,
        ("RECV", 0): 1.0,
        ("B", 0): 1.0,
        ("REDUCE", 0): 1.5,
    }


def test_it_crosses_stages_without_messages() -> None:
    free = Timeline(
        (
            Event(0, "F", 0, 0, 0.0, 1.0),
            Event(1, "F", 1, 0, 1.0, 2.0),
            Event(1, "B", 1, 0, 2.0, 3.0),
            Event(0, "B", 0, 0, 3.0, 4.0),
        ),
        devices=2,
    )
    assert tuple(step.event for step in critical_path(free)) == free.events
    assert critical_path(Timeline((), devices=1)) == ()


def test_a_bucket_that_fills_in_the_midst_of_the_backward_takes_only_so_much_of_it() -> None:
    overlapped = Timeline(
        (
            Event(0, "F", 0, 0, 0.0, 1.0),
            Event(0, "B", 0, 0, 1.0, 5.0),
            Event(1, "F", 0, 0, 0.0, 1.0),
            Event(1, "B", 0, 0, 1.0, 5.0),
            *(Event(d, "REDUCE", 0, -1, 2.0, 7.0, bytes=8.0) for d in (0, 1)),
        ),
        devices=2,
    )
    path = critical_path(overlapped)
    assert [step.event.kind for step in path] == ["F", "B", "REDUCE"]
    assert [step.seconds for step in path] == [1.0, 1.0, 5.0]


def test_a_message_waits_for_the_one_before_it_on_the_link() -> None:
    # dev 0   F0 F1       slow link: the second message leaves when the first has arrived
    # dev 1            r0        r1        F1
    queued = Timeline(
        (
            Event(0, "F", 0, 0, 0.0, 1.0),
            Event(0, "F", 0, 1, 1.0, 2.0),
            Event(0, "SEND", 0, 0, 1.0, 5.0, peer=1),
            Event(1, "RECV", 1, 0, 1.0, 5.0, peer=0),
            Event(1, "F", 1, 0, 5.0, 6.0),
            Event(0, "SEND", 0, 1, 5.0, 9.0, peer=1),
            Event(1, "RECV", 1, 1, 5.0, 9.0, peer=0),
            Event(1, "F", 1, 1, 9.0, 10.0),
        ),
        devices=2,
    )
    assert words(queued) == "F0 SEND0 RECV1 F1"
    assert seconds_on_path(critical_path(queued))["F", 0] == 1.0


def test_what_no_event_explains_is_a_wait() -> None:
    late = Timeline(
        (Event(0, "F", 0, 0, 0.5, 1.0), Event(0, "B", 0, 0, 3.0, 4.0)),
        devices=1,
    )
    path = critical_path(late)
    assert [step.waited_s for step in path] == [0.5, 2.0]
    assert sum(step.seconds + step.waited_s for step in path) == 4.0


def two_hosts_sharing_ports(stages: tuple[Stage, ...]) -> Timeline:
    """Four devices on two hosts; the tensors are large, so messages queue for the ports."""
    half = Affine(0.0, 1.0)
    layers = tuple(LayerCost(f"layer{i}", half, half, half, 10, saved_bytes=half) for i in range(4))
    edges = tuple(Edge(i, i + 1, f"t{i}", Affine(0.0, 7.0), Affine(0.0, 7.0)) for i in range(3))
    profile = ModelProfile("m", layers, edges, batch_size=4)
    host = Host("h", (Device("d", 1e9),) * 2, link_bytes_per_s=4.0, port_bytes_per_s=2.0)
    plan = Plan(stages, 3, 2, "1f1b")
    return simulate_plan(plan, profile, Cluster("c", (host, host))).timeline


@pytest.mark.parametrize(
    "stages",
    [
        (Stage(range(2), (0, 1), (1, 1)), Stage(range(2, 4), (2, 3), (1, 1))),
        (Stage(range(2), (0, 2), (1, 1)), Stage(range(2, 4), (1, 3), (1, 1))),
        tuple(Stage(range(i, i + 1), (d,), (2,)) for i, d in enumerate((0, 2, 1, 3))),
    ],
)
def test_a_simulated_timeline_is_explained_without_a_gap(stages: tuple[Stage, ...]) -> None:
    timeline = two_hosts_sharing_ports(stages)
    path = critical_path(timeline)
    assert sum(step.waited_s for step in path) == pytest.approx(0.0, abs=1e-6)
    total_s = sum(step.seconds for step in path)
    assert total_s == pytest.approx(max(event.end_s for event in timeline.events))


@pytest.mark.parametrize("transfer_s", [0.5, 1.5, 4.0])
def test_a_message_beside_its_pass_is_explained_by_what_the_pass_waited_for(
    transfer_s: float,
) -> None:
    played = play_balanced("1f1b-as", 4, 6, transfer_s=transfer_s, streams=True)
    path = critical_path(played.timeline)
    assert sum(step.waited_s for step in path) == pytest.approx(0.0, abs=1e-9)
    assert sum(step.seconds for step in path) == pytest.approx(played.iteration_s)
    assert any(step.event.kind == "RECV" for step in path) == (transfer_s > 1)


@settings(max_examples=150)
@given(problem=problems(memory=False), pick=st.integers(0, 10_000))
def test_the_path_of_any_plan_adds_up_to_its_iteration(problem: PlanningProblem, pick: int) -> None:
    plans = list(every_plan(problem, tuple(range(len(problem.cluster.devices)))))
    plan = plans[pick % len(plans)]
    prediction = simulate_plan(plan, problem.profile, problem.cluster)
    path = critical_path(prediction.timeline)
    waited_s = sum(step.waited_s for step in path)
    assert waited_s == pytest.approx(0.0, abs=1e-6)
    assert sum(step.seconds for step in path) == pytest.approx(prediction.iteration_s)
    assert all(a.until_s <= b.event.start_s + 1e-9 for a, b in pairwise(path))
