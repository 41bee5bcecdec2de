"""Every page with timelines draws them alike and answers the mouse and the keys alike."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from made_timelines import timeline_with_messages
from opened_page import OpenedPage

from penstock.report.page import write_report
from penstock.report.record import read_run
from penstock.report.timeline_files import write_timeline
from penstock.report.timelines_html import nine_digits
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.shape import PipelineShape
from penstock.timeline.palette import KIND_WORDS, LIGHT
from penstock.timeline.timeline import Event, MemorySample, Timeline

SHAPE = PipelineShape(stages=4, micro_batches=8)
SMALL = timeline_with_messages(one_f_one_b(SHAPE), SHAPE, "small </script> & <tidy>")


@dataclass
class Shown:
    """A page in a browser, and the timelines on it from above."""

    opened: OpenedPage
    timelines: tuple[Timeline, ...]

    @property
    def rows(self) -> list[tuple[int, Event]]:
        """All events with their rows on the page."""
        devices = [sorted({e.device for e in t.events}) for t in self.timelines]
        above = [sum(map(len, devices[:i])) for i in range(len(devices))]
        return [
            (above[i] + devices[i].index(event.device), event)
            for i, timeline in enumerate(self.timelines)
            for event in timeline.events
        ]


@pytest.fixture
def open_timeline(
    open_page: Callable[..., OpenedPage], tmp_path: Path
) -> Callable[..., OpenedPage]:
    """Open the page of a timeline; options are those of the browser's new page."""

    def opened(timeline: Timeline, limits: Sequence[float] = (), **options: Any) -> OpenedPage:
        path = tmp_path / "timeline.html"
        write_timeline(path, timeline, "four", limits)
        page = open_page(path, **options)
        assert page.complaints == []
        return page

    return opened


@pytest.fixture(params=["gantt page", "report"])
def shown(
    request: pytest.FixtureRequest,
    open_page: Callable[..., OpenedPage],
    open_timeline: Callable[..., OpenedPage],
) -> Shown:
    if request.param == "gantt page":
        return Shown(open_timeline(SMALL, [5.0] * 4), (SMALL,))
    directory = request.getfixturevalue("run_directory")
    record = read_run(directory)
    return Shown(open_page(write_report(directory)), (record.predicted, record.measured))


def test_the_page_opens_without_complaints_and_asks_for_nothing_else(shown: Shown) -> None:
    assert shown.opened.complaints == []
    assert len(shown.opened.requests) == 1 and shown.opened.requests[0].startswith("file://")
    outside = re.findall(r"https?://[^\s\"'<]+", shown.opened.page.content())
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_titles_are_shown_as_they_are_whatever_they_hold(
    open_timeline: Callable[..., OpenedPage],
) -> None:
    opened = open_timeline(SMALL)
    assert opened.page.title() == opened.page.locator("h1").inner_text() == SMALL.title


def test_events_have_their_colours_and_tell_what_they_are(shown: Shown) -> None:
    """One of four: the page answers in some hundredths of a second."""
    assert len(shown.rows) > 80
    assert {event.kind for _, event in shown.rows[::4]} == {event.kind for _, event in shown.rows}
    for row, event in shown.rows[::4]:
        assert shown.opened.width_of(event) > 3
        assert shown.opened.colour_of(row, event) == LIGHT.kinds[event.kind]
        told = shown.opened.told_of(row, event)
        assert told.startswith(KIND_WORDS[event.kind])
        assert f"device {event.device}, stage {event.stage}" in told
        assert (f", micro-batch {event.micro_batch}" in told) == (event.micro_batch >= 0)
        assert (f"device {event.peer}\n" in told) == (event.peer >= 0)


def test_every_device_has_a_row_with_its_stage_and_every_wide_block_its_number(
    shown: Shown,
) -> None:
    words = shown.opened.words()
    for timeline in shown.timelines:
        computing = {(e.device, e.stage) for e in timeline.events if e.kind == "F"}
        for device, stage in computing:
            assert words.count(f"device {device}") == len(shown.timelines)
            assert f"stage {stage}" in words
    wide = [
        event
        for _, event in shown.rows
        if event.kind in "FBR" and shown.opened.width_of(event) > 20
    ]
    for number in {event.micro_batch for event in wide}:
        alike = sum(event.micro_batch == number for event in wide)
        assert words.count(str(number)) >= alike > 0


def test_pointing_frames_the_same_work_in_every_timeline(shown: Shown) -> None:
    frames = shown.opened.page.locator(".same")
    assert frames.count() == 0
    rows = [(row, e) for row, e in shown.rows if (e.device, e.kind, e.micro_batch) == (1, "B", 2)]
    shown.opened.told_of(*rows[0])
    assert frames.count() == len(rows) == len(shown.timelines)
    for index, (row, event) in enumerate(rows):
        box = frames.nth(index).bounding_box()
        assert box is not None
        left, top = shown.opened.place(row, event.start_s, 0.0)
        assert (box["x"], box["y"]) == (pytest.approx(left, abs=1), pytest.approx(top, abs=1))
        assert box["width"] == pytest.approx(shown.opened.width_of(event), abs=1)
    shown.opened.page.mouse.move(5, 5)
    assert frames.count() == 0 and not shown.opened.page.locator("#tip").is_visible()


def test_a_line_marks_the_time_of_the_pointer_in_all_rows(shown: Shown) -> None:
    end_s = shown.opened.seen_s()[1]
    shown.opened.told(1, end_s / 3)
    line = shown.opened.page.locator("#cursor").bounding_box()
    last = shown.opened.place(len({row for row, _ in shown.rows}) - 1, end_s / 3)
    assert line is not None
    assert line["x"] == pytest.approx(last[0], abs=1)
    assert line["y"] < shown.opened.place(0, 0.0)[1] and line["y"] + line["height"] > last[1]


def test_the_wheel_zooms_where_it_points_with_ctrl_and_pans_with_shift(shown: Shown) -> None:
    opened, (_, whole_s) = shown.opened, shown.opened.seen_s()
    time_s = whole_s / 3
    x, y = opened.place(1, time_s)
    opened.page.mouse.move(x, y)
    opened.page.keyboard.down("Control")
    opened.page.mouse.wheel(0, -600)
    opened.page.keyboard.up("Control")
    opened.settle()
    low, high = opened.seen_s()
    assert high - low < 0.5 * whole_s
    # The pointer is on a whole pixel, which the zoom spreads.
    assert opened.place(1, time_s)[0] == pytest.approx(x, abs=3)
    opened.page.keyboard.down("Shift")
    opened.page.mouse.wheel(0, 100)
    opened.page.keyboard.up("Shift")
    opened.settle()
    assert opened.seen_s()[0] > low
    assert opened.seen_s()[1] - opened.seen_s()[0] == pytest.approx(high - low)


def test_dragging_moves_and_a_double_click_shows_all(shown: Shown) -> None:
    opened, whole_s = shown.opened, shown.opened.seen_s()
    opened.page.locator("#zoom-in").click()
    time_s = sum(opened.seen_s()) / 2
    x, y = opened.place(1, time_s)
    opened.drag((x, y), (x - 100, y))
    assert opened.place(1, time_s)[0] == pytest.approx(x - 100, abs=1)
    opened.page.mouse.dblclick(x, y)
    opened.settle()
    assert opened.seen_s() == whole_s


@pytest.mark.parametrize("with_shift", [False, True])
def test_dragging_along_the_times_or_with_shift_zooms_into_a_part(
    shown: Shown, with_shift: bool
) -> None:
    opened, (_, whole_s) = shown.opened, shown.opened.seen_s()
    begin, end = (opened.place(0, share * whole_s, 12.0) for share in (0.25, 0.5))
    if with_shift:
        opened.page.keyboard.down("Shift")
    else:
        box = opened.page.locator("#chart").bounding_box()
        assert box is not None
        begin, end = (begin[0], box["y"] + 10), (end[0], box["y"] + 10)
    opened.drag(end, begin)
    opened.page.keyboard.up("Shift")
    assert opened.seen_s() == pytest.approx((0.25 * whole_s, 0.5 * whole_s), abs=whole_s / 500)
    assert not opened.page.locator("#brush").is_visible()


def test_keys_and_buttons_zoom_and_show_all(shown: Shown) -> None:
    opened, whole_s = shown.opened, shown.opened.seen_s()
    opened.page.locator("#view").focus()
    opened.page.keyboard.press("+")
    opened.page.keyboard.press("ArrowRight")
    low, high = opened.seen_s()
    assert low > 0 and high - low == pytest.approx(0.6 * whole_s[1])
    opened.page.keyboard.press("-")
    opened.page.keyboard.press("ArrowLeft")
    opened.page.keyboard.press("0")
    assert opened.seen_s() == whole_s
    opened.page.locator("#zoom-in").click()
    opened.page.locator("#zoom-out").click()
    opened.page.locator("#zoom-in").click()
    assert opened.seen_s() != whole_s
    opened.page.locator("#show-all").click()
    assert opened.seen_s() == whole_s


def test_communication_and_memory_can_be_left_out(shown: Shown) -> None:
    opened = shown.opened
    height = "document.getElementById('extent').clientHeight"
    sent = next((row, event) for row, event in shown.rows if event.kind == "SEND")
    for part in ("memory", "messages"):
        box = opened.page.locator(f"#with-{part} input")
        box.check()
        with_part = opened.page.evaluate(height)
        box.uncheck()
        assert opened.page.evaluate(height) < with_part
    opened.settle()
    assert "send" not in opened.told_of(*sent)
    block = next((row, event) for row, event in shown.rows if event.kind == "B")
    assert "backward" in opened.told_of(*block)


def test_pointing_at_memory_tells_what_is_in_use(shown: Shown) -> None:
    opened, (_, whole_s) = shown.opened, shown.opened.seen_s()
    opened.page.locator("#with-memory input").check()
    opened.settle()
    told = opened.told(0, whole_s * 0.3, down=60.0)
    assert re.search(r"\d M?B in use\nlimit [\d.]+ M?B", told)


def test_a_dark_system_gets_dark_colours(
    open_timeline: Callable[..., OpenedPage],
) -> None:
    opened = open_timeline(SMALL, color_scheme="dark")
    swatch = opened.page.locator(".swatch").first
    assert swatch.evaluate("one => getComputedStyle(one).backgroundColor") == "rgb(43, 134, 197)"
    assert opened.colour(0, 0.9) == "#2b86c5"
    assert opened.colour(0, 7.0) == "#202933"


def test_what_is_not_there_cannot_be_toggled(
    open_timeline: Callable[..., OpenedPage],
) -> None:
    opened = open_timeline(Timeline((Event(0, "F", 0, 0, 0.0, 1.0),), 1))
    assert not opened.page.locator("#with-memory").is_visible()
    assert not opened.page.locator("#with-messages").is_visible()


def test_many_devices_scroll_within_a_page_that_is_not_wider_than_the_window(
    open_timeline: Callable[..., OpenedPage],
) -> None:
    shape = PipelineShape(stages=48, micro_batches=192)
    opened = open_timeline(timeline_with_messages(one_f_one_b(shape), shape))
    opened.page.evaluate("view.scrollTop = bands[40].top - 100")
    opened.settle()
    assert "device 40" in opened.told(40, 100.5)
    opened.page.evaluate("setRange(100, 20)")
    opened.settle()
    assert "device 41, stage 41" in opened.told(41, 104.5)
    assert opened.page.evaluate(
        "() => document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )


def test_where_blocks_are_narrower_than_a_pixel_each_kind_fills_its_share(
    open_timeline: Callable[..., OpenedPage],
) -> None:
    events = [
        Event(0, kind, 0, number, number + start, number + end)
        for number in range(10_000)
        for kind, start, end in (("F", 0.0, 0.25), ("B", 0.25, 0.75))
    ]
    memory = tuple(MemorySample(0, i / 20, 1.0) for i in range(200_000))
    opened = open_timeline(Timeline(tuple(events), 1, memory))
    # A quarter forward at the bottom, half backward above it, a quarter idle at the top.
    colours = [opened.colour(0, 5100.0, down) for down in (21.0, 12.0, 3.0)]
    assert colours == [LIGHT.kinds["F"], LIGHT.kinds["B"], LIGHT.inks["row"]]


def test_numbers_keep_nine_digits() -> None:
    assert nine_digits(0.1 + 0.2) == 0.3
    assert nine_digits(123456789012.0) == 123456789000.0
