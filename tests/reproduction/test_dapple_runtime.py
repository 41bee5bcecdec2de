"""DAPPLE's table of its runtime against GPipe: what the simulator predicts, and how nearly."""

import pytest
from reproduction.dapple_runtime import (
    LARGEST_TRIED,
    MEMORY_INPUTS,
    PUBLISHED,
    PublishedRun,
    largest_that_fits,
    mean_peak_gib,
    play,
    samples_per_s,
)

RAN = [run for run in PUBLISHED if run.samples_per_s is not None]
FITTED = [run for run in RAN if run.system == "DAPPLE" or not run.recompute]
GPIPE_RECOMPUTING = [run for run in RAN if run not in FITTED]


def throughput_ratio(run: PublishedRun) -> float:
    played = play(run.schedule, run.recompute, run.micro_batches)
    return samples_per_s(played, run.micro_batches) / (run.samples_per_s or 1)


@pytest.mark.parametrize("run", FITTED, ids=lambda run: run.name)
def test_throughput_is_within_two_percent_of_the_published(run: PublishedRun) -> None:
    assert throughput_ratio(run) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("run", GPIPE_RECOMPUTING, ids=lambda run: run.name)
def test_gpipe_with_recompute_is_within_seven_percent(run: PublishedRun) -> None:
    """The line through DAPPLE's own rows misses these two: both systems do the same work in the
    model, and GPipe's recompute rows were slower than that, whatever M. Unequal stages would add to
    each micro-batch instead, and a recompute in a bubble would shorten both alike."""
    assert throughput_ratio(run) == pytest.approx(1, abs=0.07)


def test_early_backward_has_one_point_six_times_the_throughput_of_gpipe_at_its_largest() -> None:
    ours = samples_per_s(play("1f1b", False, 16), 16)
    gpipe = samples_per_s(play("gpipe", False, 2), 2)
    assert ours / gpipe == pytest.approx(8.18 / 5.10, rel=0.02)


def test_at_equal_micro_batches_both_take_the_same_time() -> None:
    for recompute in (False, True):
        for micro_batches in (2, 3, 5, 8):
            seconds = [play(s, recompute, micro_batches).iteration_s for s in ("gpipe", "1f1b")]
            assert seconds[0] == pytest.approx(seconds[1])


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_memory_runs_out_where_it_did(run: PublishedRun) -> None:
    assert play(run.schedule, run.recompute, run.micro_batches).fits == (run.peak_gb is not None)


def test_gpipe_is_limited_by_memory_and_early_backward_is_not() -> None:
    assert largest_that_fits("gpipe", recompute=False) == 2
    # Published: 5 fit and 8 do not; those between were not shown.
    assert 5 <= largest_that_fits("gpipe", recompute=True) < 8
    for recompute in (False, True):
        assert largest_that_fits("1f1b", recompute) == LARGEST_TRIED


@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_of_early_backward_does_not_grow_with_the_micro_batches(
    recompute: bool,
) -> None:
    peaks = {play("1f1b", recompute, m).peak_memory_bytes for m in (2, 3, 5, 8, 16)}
    assert len(peaks) == 1


def test_memory_without_recompute_is_within_two_percent() -> None:
    plain = [run for run in RAN if run not in MEMORY_INPUTS and not run.recompute]
    assert len(plain) == 3
    for run in plain:
        peak = mean_peak_gib(play(run.schedule, False, run.micro_batches))
        assert peak == pytest.approx(run.peak_gb, rel=0.02)


def test_early_backward_saves_as_much_of_gpipes_memory_as_published_within_a_hundredth() -> None:
    """Half of what a micro-batch saves on the last stage; the released planner has 7 % more of that
    than the two rows of the table differ by."""
    saving = 1 - mean_peak_gib(play("1f1b", False, 16)) / mean_peak_gib(play("gpipe", False, 2))
    published = 1 - 10.6 / 12.1
    assert saving == pytest.approx(published, abs=0.01)


def test_memory_with_recompute_is_within_three_percent_of_the_published() -> None:
    peaks = {m: mean_peak_gib(play("1f1b", True, m)) for m in (2, 8, 16)}
    assert set(peaks.values()) == {peaks[2]}
    assert peaks[2] == pytest.approx(8.5, rel=0.03)
    assert peaks[2] < mean_peak_gib(play("1f1b", False, 8))
