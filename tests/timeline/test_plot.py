"""What pictures show; no test compares the bytes of a file with another picture's."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from made_timelines import schedule_timeline, timeline_with_messages
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection, PolyCollection
from matplotlib.figure import Figure
from schedule_shapes import placed

from penstock.errors import BadInput
from penstock.schedule.families.early_backward import gpipe, one_f_one_b
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule, parse_schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.unit_times import unit_timeline
from penstock.timeline.device_rows import gantt_rows
from penstock.timeline.plot import PICTURES, picture, plot_bars, plot_timeline, write_picture
from penstock.timeline.timeline import Event, Timeline

SHAPE = PipelineShape(stages=4, micro_batches=8)
SMALL = timeline_with_messages(one_f_one_b(SHAPE), SHAPE, "four devices")


def blocks(ax: Axes) -> list[tuple[float, float, float]]:
    """The middle, the left and the right end of every block."""
    found: list[tuple[float, float, float]] = []
    for drawn in ax.collections:
        if isinstance(drawn, PolyCollection) and not isinstance(drawn, FillBetweenPolyCollection):
            boxes = (path.get_extents() for path in drawn.get_paths())
            found += [((box.y0 + box.y1) / 2, box.x0, box.x1) for box in boxes]
    return found


def numbers(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_text().isdigit()]


def legend_of(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    assert legend is not None
    return [text.get_text() for text in (legend.get_title(), *legend.get_texts())]


def test_every_event_is_a_block_at_its_time() -> None:
    ax = plot_timeline(SMALL)
    drawn = sorted((left, right) for _, left, right in blocks(ax))
    assert drawn == sorted((event.start_s, event.end_s) for event in SMALL.events)
    assert ax.get_xlim() == (0.0, 34.5)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [f"device {device}  stage {device}" for device in range(4)]
    assert ax.get_title(loc="left") == "four devices"
    assert {"forward", "backward", "send", "gradient all-reduce"} <= set(legend_of(ax))


def test_computing_messages_sent_and_received_have_a_lane_each() -> None:
    lanes = Counter(round(middle, 6) for middle, _, _ in blocks(plot_timeline(SMALL)))
    assert len(lanes) == 4 * 3


def test_numbers_stand_on_blocks_that_have_room_and_memory_behind_the_rows() -> None:
    ax = plot_timeline(SMALL)
    assert sorted(numbers(ax)) == sorted(2 * 4 * [str(m) for m in range(8)])
    assert [text.get_text() for text in ax.texts][-1] == "1 B"
    assert sum(isinstance(drawn, FillBetweenPolyCollection) for drawn in ax.collections) == 4
    many = PipelineShape(stages=4, micro_batches=500)
    crowded = plot_timeline(timeline_with_messages(gpipe(many), many))
    assert numbers(crowded) == []
    assert all(drawn.get_rasterized() for drawn in crowded.collections[:3])


def test_given_axes_are_drawn_on_and_returned() -> None:
    figure = Figure()
    first, second = figure.subplots(2)
    assert plot_timeline(SMALL, first, "another title") is first
    assert first.get_title(loc="left") == "another title" and not second.collections
    assert plot_bars(["a"], [1.0], [0.5], 0.5, second) is second
    assert plot_timeline(SMALL).get_figure() is not figure
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_nothing_to_draw_is_drawn_without_complaint() -> None:
    assert picture(plot_timeline(Timeline((), 2)), ".svg")


@pytest.mark.parametrize("ending", PICTURES)
def test_files_are_of_their_kind_and_the_same_again(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"timeline{ending.upper()}"
    write_picture(plot_timeline(SMALL), path)
    start = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}[ending]
    assert path.read_bytes().startswith(start)
    assert path.read_bytes() == picture(plot_timeline(SMALL), ending)


def test_an_svg_has_words_that_can_be_found() -> None:
    assert "four devices" in picture(plot_timeline(SMALL), ".svg").decode()


def test_bars_show_what_devices_compute_and_far_ones_are_cut_off() -> None:
    ax = plot_bars(["a", "b", "far"], [2.0, 4.0, 50.0], [0.75, 0.5, 0.5], 1.6)
    whole, busy = ax.containers
    assert [bar.get_width() for bar in whole] == pytest.approx([2.0, 4.0, 4.48])
    assert [bar.get_width() for bar in busy] == pytest.approx([1.5, 2.0, 4.48])
    assert [text.get_text() for text in ax.texts] == [
        "  2.00 s, 1.25x the bound",
        "  4.00 s, 2.50x the bound",
        "  50.0 s (cut off), 31.25x the bound",
    ]
    assert "no plan takes less than 1.60 s" in legend_of(ax)


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInput, match=r"pip install 'penstock\[plot\]'"):
        plot_timeline(SMALL)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"fbp-as"}))
def test_unit_times_are_those_of_the_clock(name: str) -> None:
    """The clock knows which stages are on a device; for unit costs the orders say enough."""
    shape = placed(FAMILIES[name].placement, 4, 8, rounds=2)
    schedule = FAMILIES[name].make(shape)
    known = schedule_timeline(schedule, shape).events
    assert sorted(map(words, unit_timeline(schedule.orders).events)) == sorted(map(words, known))


def words(event: Event) -> str:
    return f"{event.device}: {event.stage}{event.kind}{event.micro_batch} at {event.start_s}"


def test_a_schedule_is_drawn_by_itself() -> None:
    ax = one_f_one_b(SHAPE).plot()
    assert len(blocks(ax)) == 2 * 4 * 8 and ax.get_xlim() == (0.0, 33.0)
    assert Schedule(()).plot().get_xlim() == (0.0, 1.0)
    with pytest.raises(BadInput, match="deadlocks"):
        parse_schedule("stage 0 B0 F0").plot()


def test_directions_of_a_mirrored_schedule_have_different_shades() -> None:
    schedule = parse_schedule("stage 0,1 0F0 1F1 1B1 0B0\nstage 0,1 0F1 1F0 1B0 0B1")
    assert "light: odd micro-batches, the other way round" in legend_of(schedule.plot())


def test_replicas_are_no_mirror() -> None:
    events = tuple(Event(d, "F", 0, m, float(m), m + 1.0) for d in (0, 1) for m in (0, 1))
    assert not gantt_rows(Timeline(events, 2)).mirrored
