"""Gradients summed in shared memory: right on every rank, the same bits, and never for ever."""

from runtime.gradients.shared_sum_cases import (
    bits_of_replicas,
    sum_that_is_changed_at_once,
    sums_of_many_rounds,
    waiting_for_a_rank_that_gives_nothing,
)

from penstock.runtime.processes.heartbeat import BEAT_S, QUIET_S
from penstock.runtime.processes.launch import launch_workers


def test_sums_are_right_however_late_a_rank_is() -> None:
    assert launch_workers(sums_of_many_rounds, (), workers=3, threads=1) == ([], [], [])


def test_gradients_may_change_as_soon_as_a_rank_has_finished() -> None:
    """As clipping does where weights are updated without a flush, with nothing in between."""
    found = launch_workers(sum_that_is_changed_at_once, (), workers=2, threads=1)
    assert found == ([3.0] * 4, [3.0] * 4)


def test_a_rank_that_hands_nothing_is_named() -> None:
    (words, seconds), _ = launch_workers(
        waiting_for_a_rank_that_gives_nothing, (), workers=2, threads=1
    )
    assert words == (
        "rank 0 waited 1 s for the gradient sum of stage 0 with rank 1; rank 1 does not wait: it "
        "builds the pipeline"
    )
    # The limit, and then the time after which a rank that does not answer shows.
    assert 1.0 <= seconds - QUIET_S - BEAT_S < 3.0


def test_replicas_get_the_same_bits() -> None:
    first, *others = launch_workers(bits_of_replicas, ("shared-memory",), workers=3, threads=1)
    assert sum(map(len, first)) > 100
    assert all(other == first for other in others)
