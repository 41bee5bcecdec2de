"""The published figures of schedules: bubble, activations and weights, each with its source.

``p`` device groups and ``M`` micro-batches; F, I and W are the times of a micro-batch on a group,
over all of its stages, and ``B = I + W``; transfers are free. The bubble is what a group idles of
the iteration: makespan less ``M (F + B)``. Peaks are in micro-batches of a group. Where a row is
not the published form, it says what is measured instead, and why.
"""

from functools import cache

import pytest
from schedule_shapes import bubble_s, placed

from penstock.schedule.clock import makespan_s, memory_peaks_bytes, times_of
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost
from penstock.schedule.validate import in_flight_peaks

GROUPS = range(2, 9)

EQUAL = (1.0, 1.0, 1.0)
SHORT_W = (1.0, 1.25, 0.75)
LONG_F = (2.0, 1.0, 1.0)
LONG_B = (1.0, 1.5, 1.0)
HALVES = (2.0, 1.0, 1.0)
WORKS = (EQUAL, SHORT_W, LONG_F, LONG_B)
"""F, I and W of a micro-batch on a group."""

Work = tuple[float, float, float]


Played = tuple[Schedule, PipelineShape]


@cache
def played(
    name: str,
    groups: int,
    micro_batches: int,
    work: Work,
    *,
    style: PlacementStyle = "straight",
    rounds: int = 1,
) -> Played:
    """A family on ``groups`` groups; a stage is a part of the work of its group."""
    seconds = (part / rounds for part in work)
    cost = StageCost(*seconds, saved_bytes=1 / rounds)
    shape = placed(style, groups, micro_batches, rounds, cost)
    return FAMILIES[name].make(shape), shape


def peak(row: Played) -> float:
    """Most micro-batches on a group: the saved bytes of its stages are one."""
    return max(memory_peaks_bytes(*row))


def micro_batches_up_to_four_times(groups: int) -> range:
    return range(1, 4 * groups + 1)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "early-backward"])
def test_gpipe_neurips_2019_and_early_backward_dapple_ppopp_2021(
    name: str, groups: int, work: Work
) -> None:
    forward, inputs, weights = work
    for count in micro_batches_up_to_four_times(groups):
        row = played(name, groups, count, work)
        assert bubble_s(*row) == pytest.approx((groups - 1) * (forward + inputs + weights))
        most = {"gpipe": count, "1f1b": groups, "early-backward": 2 * groups - 1}[name]
        assert peak(row) == min(most, count)


def test_early_backward_with_a_deeper_warm_up_hides_transfers_of_a_stage_dapple_ppopp_2021() -> (
    None
):
    for groups in GROUPS:
        costs = (StageCost(1.0, 0.5, 0.5, transfer_s=1.0),) * groups
        shape = PipelineShape(groups, 4 * groups, costs=costs)
        deep_s = makespan_s(FAMILIES["early-backward"].make(shape), shape)
        # The steady state has no gap: only the fill and the drain have the transfers.
        assert deep_s == pytest.approx((4 * groups + groups - 1) * 2 + 2 * (groups - 1))
        assert makespan_s(FAMILIES["1f1b"].make(shape), shape) > deep_s


@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize("groups", GROUPS)
def test_breadth_first_mlsys_2023_section_4_1(groups: int, rounds: int) -> None:
    for count in range(groups, 4 * groups + 1):
        row = played("breadth-first", groups, count, LONG_B, style="looped", rounds=rounds)
        assert bubble_s(*row) == pytest.approx((groups - 1) * sum(LONG_B) / rounds)
        assert peak(row) == count


@pytest.mark.parametrize("work", [SHORT_W, LONG_F, LONG_B])
@pytest.mark.parametrize("name, weight_parts", [("zb-h1", 1), ("zb-h2", 2)])
def test_zero_bubble_by_hand_with_unequal_work(name: str, weight_parts: int, work: Work) -> None:
    forward, inputs, weights = work
    for groups in GROUPS:
        row = played(name, groups, 4 * groups, work)
        published_s = (groups - 1) * (forward + inputs - weight_parts * weights)
        assert own_bubble_s(row, 4 * groups * sum(work)) == pytest.approx(published_s)


def own_bubble_s(row: Played, busy_s: float) -> float:
    """The most that a group idles between its first start and its last end."""
    times = times_of(*row)
    return max(
        float(ends[-1] - starts[0]) - busy_s
        for starts, ends in zip(times.start_s, times.end_s, strict=True)
    )


@pytest.mark.parametrize("work", [HALVES, EQUAL, LONG_B])
@pytest.mark.parametrize("name, style", [("chimera", "mirrored"), ("hanayo", "folded")])
def test_micro_batches_that_are_no_multiple_of_the_groups_take_no_longer_than_more_would(
    name: str, style: PlacementStyle, work: Work
) -> None:
    """Both papers have multiples of the groups only."""
    for groups in (2, 4, 6, 8):
        rounds = {"chimera": 1, "hanayo": 2}[name]
        bubble_of_1f1b_s = (groups - 1) * sum(work)
        for count in micro_batches_up_to_four_times(groups):
            row, fuller = (
                played(name, groups, micro_batches, work, style=style, rounds=rounds)
                for micro_batches in (count, -(-count // groups) * groups)
            )
            assert makespan_s(*row) <= makespan_s(*fuller) + 1e-9
            assert bubble_s(*row) <= bubble_of_1f1b_s + 1e-9
            assert peak(row) <= min(groups, count)


ASYNCHRONOUS = (
    "vanilla",
    "pipedream",
    "pipedream-vertical-sync",
    "2bw",
    "spectrain",
    "spectrain-v2",
    "xpipe",
    "pipeoptim",
)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_schedules_hold_what_their_papers_say(name: str, groups: int) -> None:
    for count in micro_batches_up_to_four_times(groups):
        row = played(name, groups, count, EQUAL)
        in_flight = tuple(min(groups - stage, count) for stage in range(groups))
        assert in_flight_peaks(*row) == in_flight
        rule = row[0].weights
        copies = tuple(rule.versions_of(stage) for stage in range(groups))
        # PipeDream (SOSP 2019): a version for every micro-batch in flight, with vertical sync on
        # the first stage; PipeDream-2BW (ICML 2021): two; SpecTrain and PipeOptim: the weights and
        # one prediction of them where a stage predicts at all, SpecTrain's second version one for
        # every micro-batch in flight. XPipe's text speaks of one prediction too; but the forwards
        # of a mini-batch take turns with backwards, which have another.
        #
        # A stage predicts where updates of its own come between what it counts from and to. From
        # a forward to its backward on the same stage there is none on the last stage only. To the
        # backward on the first stage there are some on the last stage too, from three stages on.
        # XPipe's counts, (N + T - k / 2 - 2) / T and more, are never rounded to 0.
        to_its_backward = tuple(stage < groups - 1 for stage in range(groups))
        to_the_first_stage = tuple(p or groups > 2 for p in to_its_backward)
        expected = {
            "vanilla": (1,) * groups,
            "pipedream": in_flight,
            "pipedream-vertical-sync": (in_flight[0],) * groups,
            "2bw": (2,) * groups,
            "spectrain": tuple(1 + p for p in to_the_first_stage),
            "spectrain-v2": tuple(
                1 + held * p for held, p in zip(in_flight, to_its_backward, strict=True)
            ),
            "xpipe": (3 if count > 1 else 2,) * groups,
            "pipeoptim": tuple(1 + p for p in to_its_backward),
        }
        assert copies == expected[name]
        # Methods of mini-batches of several: as many as stages or more, in equal parts.
        sizes = [size for size in range(groups, count + 1) if count % size == 0] or [count]
        assert rule.micro_batches_per_update == (sizes[0] if name in ("2bw", "xpipe") else 1)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_schedules_have_no_bubble_between_fill_and_drain(
    name: str, groups: int
) -> None:
    row = played(name, groups, 4 * groups, HALVES)
    times = times_of(*row)
    for group in range(groups):
        starts, ends = times.start_s[group], times.end_s[group]
        first, last = 2 * groups, len(starts) - 2 * groups
        assert starts[first:last] == pytest.approx(ends[first - 1 : last - 1])
