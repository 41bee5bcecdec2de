"""Slow ranks and slow links are found by comparison with the plan, and noise is not."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Link
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.simulation import simulate_plan
from penstock.timeline.drift import STEADY_SAMPLES, Drift, DriftWatch, Part
from penstock.timeline.timeline import Timeline

Played = Callable[..., Timeline]


@pytest.fixture(scope="module")
def played(small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster) -> Played:
    """Play the plan on devices of these speeds."""

    def play(speeds: Sequence[float] = (1.0,) * 4, links: Sequence[Link] = ()) -> Timeline:
        host = small_cluster.hosts[0]
        devices = tuple(replace(d, speed=s) for d, s in zip(host.devices, speeds, strict=True))
        cluster = replace(
            small_cluster, hosts=(replace(host, devices=devices),), links=tuple(links)
        )
        return simulate_plan(small_plan, small_profile, cluster).timeline

    return play


def watched(planned: Timeline, measured: Sequence[Timeline]) -> tuple[Drift, ...]:
    """What has drifted after these iterations."""
    watch = DriftWatch(planned, 1)
    for timeline in measured:
        watch.add(timeline)
    return watch.drifts


def test_a_slow_rank_is_named_when_it_is_steady(played: Played) -> None:
    planned = played()
    # All ranks are slower than planned, and one of the two replicas much more so.
    slow = played((0.8, 0.8, 0.4, 0.8))
    assert not watched(planned, [planned, *[slow] * (STEADY_SAMPLES - 1)])
    (drift,) = watched(planned, [planned, *[slow] * (STEADY_SAMPLES + 3)])
    assert str(drift).startswith("stage 1 on rank 2 is a straggler: ")
    assert str(drift).endswith(", 2 times as slow as the other ranks")
    assert drift.part == Part("stage", 1, 2)
    # It recovers.
    assert not watched(planned, [slow] * 9 + [planned])


def test_a_slow_link_is_named(played: Played) -> None:
    planned = played()
    slow = played(links=[Link(0, 1, 5e6, 1e-4)])
    (drift,) = watched(planned, [slow] * STEADY_SAMPLES)
    assert drift.part == Part("link", 0, 1)
    assert str(drift).startswith("the link from rank 0 to rank 1 is slow: ")


def test_ranks_that_are_all_as_slow_are_no_stragglers(played: Played) -> None:
    planned = played()
    slow = played((0.3,) * 4)
    assert not watched(planned, [slow] * 9)


@given(seed=st.integers(0, 10**6))
def test_noise_is_no_drift(seed: int, played: Played) -> None:
    """Events that last up to four times as long at random, but never on one rank for long."""
    planned = played()
    chance = random.Random(seed)

    def noisy(step: int) -> Timeline:
        # In every iteration another rank is disturbed.
        factors = [chance.uniform(1.0, 1.2) for _ in range(4)]
        factors[step % 4] = chance.uniform(1.0, 4.0)
        events = tuple(
            replace(e, end_s=e.start_s + (e.end_s - e.start_s) * factors[e.device])
            for e in planned.events
        )
        return replace(planned, events=events)

    watch = DriftWatch(planned, 1)
    for step in range(20):
        watch.add(noisy(step))
        assert not [drift for drift in watch.drifts if drift.part.kind == "stage"]


def test_a_batch_of_several_counts_once(played: Played) -> None:
    planned = played()
    twice = replace(planned, events=(*planned.events, *planned.events))
    watch = DriftWatch(planned, 2)
    factors = watch.add(twice)
    assert factors["all_ranks"] == pytest.approx(1.0)
    assert factors["stage_1_rank_2"] == pytest.approx(1.0)
