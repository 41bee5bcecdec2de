"""The automatic zero-bubble search against published figures and the bound."""

import pytest

from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.searched import list_search
from penstock.schedule.searched.automatic_zero_bubble import zero_bubble
from penstock.schedule.searched.bound import makespan_bound_s
from penstock.schedule.searched.list_search import SEEDS
from penstock.schedule.shape import PipelineShape, StageCost, folded
from penstock.schedule.validate import validate

EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (1.0, 1.2, 0.9)


def device(
    groups: int, micro_batches: int, times: tuple[float, ...], room: float, chunks: int
) -> PipelineShape:
    """A pipeline whose groups hold one chunk, or two on a V; I frees half of what F saves."""
    f, i, w = (part / chunks for part in times)
    cost = StageCost(f, i, w, saved_bytes=1 / chunks, kept_bytes=0.5 / chunks)
    return PipelineShape(
        groups * chunks,
        micro_batches,
        placement=folded(groups, chunks),
        costs=(cost,) * (groups * chunks),
        memory_bytes=(room,) * groups,
    )


@pytest.mark.parametrize(
    ("groups", "micro_batches", "times", "room", "chunks", "published"),
    [
        (4, 8, EQUAL, 4.0, 1, 27.0),
        (4, 8, UNEQUAL, 4.0, 1, 28.7),
        (8, 32, EQUAL, 8.0, 1, 103.0),
        (16, 32, UNEQUAL, 32.0, 1, 114.2),
        (4, 32, UNEQUAL, 4.0, 2, 101.0),
        (16, 64, EQUAL, 16.0, 2, 199.5),
        (8, 16, EQUAL, 5.0, 2, 56.5),
        (4, 8, EQUAL, 2.0, 2, 29.5),
    ],
)
def test_it_is_no_slower_than_the_generators_of_the_zero_bubble_authors(
    groups: int,
    micro_batches: int,
    times: tuple[float, ...],
    room: float,
    chunks: int,
    published: float,
) -> None:
    """Orders of their generators (ICLR 2024, NeurIPS 2024), replayed; in units of F."""
    shape = device(groups, micro_batches, times, room, chunks)
    schedule = zero_bubble(shape)
    validate(schedule, shape)
    # The published figures have one decimal.
    assert makespan_s(schedule, shape) <= published + 0.05


@pytest.mark.parametrize(
    ("groups", "micro_batches", "room", "published"),
    [(4, 8, 2.0, 34.5), (8, 16, 4.0, 71.8), (8, 16, 5.0, 60.6), (8, 32, 4.0, 129.4)],
)
def test_it_is_quicker_where_their_patterns_for_equal_times_meet_unequal_ones(
    groups: int, micro_batches: int, room: float, published: float
) -> None:
    shape = device(groups, micro_batches, UNEQUAL, room, chunks=2)
    assert makespan_s(zero_bubble(shape), shape) < published - 0.05


@pytest.mark.parametrize("longer", [0, 3, 4, 7])
def test_unequal_stages_reach_the_bound(longer: int) -> None:
    costs = tuple(
        StageCost(f, 1.2 * f, 0.9 * f, kept_bytes=0.5)
        for f in (1.5 if stage == longer else 1.0 for stage in range(8))
    )
    shape = PipelineShape(8, 32, costs=costs, memory_bytes=(16.0,) * 8)
    schedule = zero_bubble(shape)
    assert makespan_s(schedule, shape) == pytest.approx(makespan_bound_s(shape), rel=1e-9)


def test_without_limits_it_stays_within_the_memory_of_1f1b() -> None:
    shape = PipelineShape(stages=4, micro_batches=16)
    assert max(memory_peaks_bytes(zero_bubble(shape), shape)) <= 4.0


def test_the_search_ends_where_the_bound_for_the_memory_is_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four groups, the first half as slow again: 76.5 is the least in this memory, and 74.4 in
    more, which a bound without memory cannot tell apart."""
    first, other = StageCost(1.5, 1.8, 1.35, kept_bytes=0.5), StageCost(1, 1.2, 0.9, kept_bytes=0.5)
    shape = PipelineShape(4, 16, costs=(first, *(other,) * 3), memory_bytes=(4.0,) * 4)
    tried: list[int] = []
    attempt = list_search.ListSearch.attempt

    def counted(search: list_search.ListSearch, *arguments: object) -> None:
        tried.append(1)
        attempt(search, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(list_search.ListSearch, "attempt", counted)
    assert makespan_s(zero_bubble(shape), shape) == pytest.approx(76.5)
    assert makespan_bound_s(shape) == pytest.approx(76.5)
    assert len(tried) <= len(SEEDS)
