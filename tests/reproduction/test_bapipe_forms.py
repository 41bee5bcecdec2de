"""Which of BaPipe's closed forms the simulator gives exactly, and how far off the others are."""

import pytest
from reproduction.bapipe_forms import closed_form_s, played_s

from penstock.planners.bapipe.formulas import Method, pace_s

STAGES = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 5, 32)
BACKWARDS_S = (1.0, 2.0)
TRANSFERS_S = (0.25, 0.5, 1.0)
SIZES = [(n, m) for n in STAGES for m in MICRO_BATCHES]


@pytest.mark.parametrize("method", ["1f1b-as", "fbp-as"])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_as_is_exact_where_a_message_passes_within_its_pass(
    method: Method, stages: int, micro_batches: int
) -> None:
    for backward_s in BACKWARDS_S:
        for transfer_s in TRANSFERS_S:
            form_s = closed_form_s(method, stages, micro_batches, 1 + backward_s, transfer_s)
            sizes = (stages, micro_batches, 1.0, backward_s, transfer_s)
            assert played_s(method, *sizes, separate_links=True) == pytest.approx(form_s)
            if transfer_s <= 0.5:
                assert played_s(method, *sizes) == pytest.approx(form_s)


def pace_played_s(
    method: Method, stages: int, backward_s: float, transfer_s: float, *, half_duplex: bool
) -> float:
    """Seconds that each further micro-batch adds where every boundary has a link of its own."""
    links = {"separate_links": True, "half_duplex": half_duplex}
    few_s, many_s = (
        played_s(method, stages, m, 1.0, backward_s, transfer_s, **links) for m in (64, 128)
    )
    return (many_s - few_s) / 64


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("backward_s", BACKWARDS_S)
def test_fbp_as_keeps_its_pace_down_to_the_bandwidth_of_the_paper(
    stages: int, backward_s: float
) -> None:
    """``2 a / (F + B)`` on a link that takes turns; activations and gradients pass it in turn."""
    for transfer_s in (0.5, 1.0, 1.25, 1.5, 2.0, 3.0):
        pace = pace_s("fbp-as", forward_s=1.0, backward_s=backward_s, transfer_s=transfer_s)
        played = pace_played_s("fbp-as", stages, backward_s, transfer_s, half_duplex=True)
        assert played == pytest.approx(pace)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("backward_s", BACKWARDS_S)
def test_1f1b_as_needs_a_bandwidth_of_a_over_f(stages: int, backward_s: float) -> None:
    """Up to there it keeps its pace; beyond, it loses time, at most as much as its form says."""
    times = {"forward_s": 1.0, "backward_s": backward_s}
    for transfer_s in (0.5, 1.0):
        played = pace_played_s("1f1b-as", stages, backward_s, transfer_s, half_duplex=False)
        assert played == pytest.approx(1 + backward_s)
    for transfer_s in (1.25, 1.5, 2.0, 3.0):
        played = pace_played_s("1f1b-as", stages, backward_s, transfer_s, half_duplex=False)
        assert 1 + backward_s < played < pace_s("1f1b-as", **times, transfer_s=transfer_s)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_1f1b_so_is_exact_up_to_a_transfer_as_long_as_a_forward(
    stages: int, micro_batches: int
) -> None:
    for backward_s in BACKWARDS_S:
        for transfer_s in TRANSFERS_S:
            form_s = closed_form_s("1f1b-so", stages, micro_batches, 1 + backward_s, transfer_s)
            played = played_s("1f1b-so", stages, micro_batches, 1.0, backward_s, transfer_s)
            assert played == pytest.approx(form_s)


@pytest.mark.parametrize(("stages", "micro_batches"), [s for s in SIZES if s[0] <= 2 or s[1] == 1])
def test_1f1b_sno_is_exact_on_two_stages_and_for_one_micro_batch(
    stages: int, micro_batches: int
) -> None:
    for backward_s in BACKWARDS_S:
        for transfer_s in TRANSFERS_S:
            form_s = closed_form_s("1f1b-sno", stages, micro_batches, 1 + backward_s, transfer_s)
            played = played_s("1f1b-sno", stages, micro_batches, 1.0, backward_s, transfer_s)
            assert played == pytest.approx(form_s)


def off_sno_s(
    stages: int, micro_batches: int, backward_s: float, transfer_s: float, *, half_duplex: bool
) -> float:
    """Seconds that are played beyond SNO's form where every pair of devices has a link."""
    form_s = closed_form_s("1f1b-sno", stages, micro_batches, 1 + backward_s, transfer_s)
    links = {"separate_links": True, "half_duplex": half_duplex}
    return (
        played_s("1f1b-sno", stages, micro_batches, 1.0, backward_s, transfer_s, **links) - form_s
    )


@pytest.mark.parametrize("stages", range(3, 9))
@pytest.mark.parametrize("backward_s", [0.8, 1.0, 2.0, 3.0])
def test_1f1b_sno_on_separate_links_is_exact_while_transfers_are_shorter_than_work(
    stages: int, backward_s: float
) -> None:
    """Both messages of a boundary pass at once: two transfers' time for four messages."""
    for transfer_s in (0.1, 0.25, 0.5, 0.75, 0.79, 0.99):
        if transfer_s < min(1.0, backward_s):
            for m in (1, 2, 3, 5, 8, 32):
                off_s = off_sno_s(stages, m, backward_s, transfer_s, half_duplex=False)
                assert off_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("micro_batches", [2, 5, 32])
def test_1f1b_sno_on_two_stages_needs_a_half_duplex_link_to_be_exact(micro_batches: int) -> None:
    """On the only boundary, activations and gradients cross at once on a link each way: half of
    what the form counts, while stages between two others need that for it."""
    for transfer_s in (*TRANSFERS_S, 1.5, 3.0):
        for backward_s in (0.3, 1.0, 2.0):
            exact_s = off_sno_s(2, micro_batches, backward_s, transfer_s, half_duplex=True)
            assert exact_s == pytest.approx(0, abs=1e-9)
    for transfer_s in TRANSFERS_S:
        both_ways_s = off_sno_s(2, micro_batches, 2.0, transfer_s, half_duplex=False)
        assert both_ways_s == pytest.approx(-(micro_batches - 2) * transfer_s)
