import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_timelines import timeline_with_messages
from playwright.sync_api import Browser, Page, sync_playwright

from penstock.report.gantt_page import rounded
from penstock.report.timeline_files import write_timeline
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.shape import PipelineShape
from penstock.timeline.timeline import Event, Timeline

CHROMIUM = "/usr/bin/chromium"
SHAPE = PipelineShape(stages=4, micro_batches=8)
SMALL = timeline_with_messages(one_f_one_b(SHAPE), SHAPE, "small </script> & <tidy>")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


class Opened:
    """The page of a timeline in a browser, with all that it asked for or complained of."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page, self.requests, self.complaints = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(path.as_uri())
        self.settle()

    def settle(self) -> None:
        """Wait until the chart is drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done()))")

    def place(self, row: int, time_s: float, down: float = 12.0) -> tuple[float, float]:
        """Where a time of a row is on the screen, so far down from the top of the row."""
        box = self.page.locator("#chart").bounding_box()
        assert box is not None
        x, y = self.page.evaluate(f"[xOf({time_s}), rowTop({row})]")
        return box["x"] + x, box["y"] + y + down

    def told(self, row: int, time_s: float, down: float = 12.0) -> str:
        """What the tip says there."""
        self.page.mouse.move(*self.place(row, time_s, down))
        return self.page.locator("#tip").inner_text()

    def colour(self, row: int, time_s: float, down: float = 4.0) -> tuple[int, int, int]:
        """The colour of the chart there."""
        red, green, blue = self.page.evaluate(
            f"""() => {{
                const ratio = window.devicePixelRatio;
                const at = [xOf({time_s}) * ratio, (rowTop({row}) + {down}) * ratio];
                return [...pen.getImageData(...at, 1, 1).data].slice(0, 3);
            }}"""
        )
        return red, green, blue

    def seen_s(self) -> tuple[float, float]:
        """The times at the ends of the chart."""
        low, high = self.page.evaluate("[range.low, range.high]")
        return low, high


def opened_page(browser: Browser, path: Path, **options: object) -> Opened:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, **options)  # type: ignore[arg-type]
    return Opened(page, path)


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    path = tmp_path / "timeline.html"
    write_timeline(path, SMALL, "four", [5.0] * 4)
    page = opened_page(browser, path)
    yield page
    page.page.close()


def test_the_page_opens_without_complaints_and_asks_for_nothing_else(opened: Opened) -> None:
    assert opened.complaints == []
    assert len(opened.requests) == 1 and opened.requests[0].startswith("file://")
    assert opened.page.title() == SMALL.title
    assert opened.page.locator("h1").inner_text() == SMALL.title
    outside = re.findall(r"https?://[^\s\"'<]+", opened.page.content())
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_pointing_at_a_block_tells_all_about_it(opened: Opened) -> None:
    told = opened.told(2, 10.0)
    assert "backward, micro-batch 1" in told and "device 2, stage 2" in told
    assert "9.00000 s to 11.0000 s" in told and "takes 2.000 s" in told
    assert "forward, micro-batch 2" in opened.told(2, 8.5)


def test_pointing_at_a_message_tells_the_other_device_and_the_bytes(opened: Opened) -> None:
    sent = opened.told(0, 1.1, down=28.0)
    assert "send, micro-batch 0" in sent and "to device 1" in sent and "4.00 MB" in sent
    received = opened.told(1, 1.1, down=35.0)
    assert "receive, micro-batch 0" in received and "from device 0" in received


def test_pointing_at_memory_tells_what_is_in_use(opened: Opened) -> None:
    told = opened.told(0, 5.0, down=60.0)
    assert "4 B in use" in told and "limit 5 B" in told


def test_blocks_have_the_colours_of_their_kinds(opened: Opened) -> None:
    assert opened.colour(0, 0.9) == (0x00, 0x72, 0xB2)
    assert opened.colour(2, 9.2) == (0xE6, 0x9F, 0x00)
    assert opened.colour(0, 7.0) == (0xF0, 0xF2, 0xF5)


def test_the_wheel_zooms_where_it_points_and_dragging_moves(opened: Opened) -> None:
    whole = opened.seen_s()
    x, y = opened.place(1, 10.0)
    opened.page.mouse.move(x, y)
    opened.page.mouse.wheel(0, -600)
    opened.settle()
    low, high = opened.seen_s()
    assert high - low < 0.5 * (whole[1] - whole[0])
    # The pointer is on a whole pixel, which the zoom spreads.
    assert opened.place(1, 10.0)[0] == pytest.approx(x, abs=2)
    x = opened.place(1, 10.0)[0]
    assert "micro-batch 1" in opened.told(2, 10.0)
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 200, y, steps=4)
    opened.page.mouse.up()
    opened.settle()
    assert opened.place(1, 10.0)[0] == pytest.approx(x - 200, abs=1)
    opened.page.mouse.dblclick(x, y)
    opened.settle()
    assert opened.seen_s() == whole


def test_keys_and_buttons_zoom_and_show_all(opened: Opened) -> None:
    whole = opened.seen_s()
    opened.page.locator("#view").focus()
    opened.page.keyboard.press("+")
    opened.page.keyboard.press("ArrowRight")
    low, high = opened.seen_s()
    assert low > 0 and high - low == pytest.approx(0.6 * whole[1])
    opened.page.locator("#zoom-out").click()
    opened.page.locator("#show-all").click()
    assert opened.seen_s() == whole


def test_communication_and_memory_can_be_left_out(opened: Opened) -> None:
    height = "rowHeight()"
    with_all = opened.page.evaluate(height)
    opened.page.locator("#with-memory input").uncheck()
    without_memory = opened.page.evaluate(height)
    opened.page.locator("#with-messages input").uncheck()
    opened.settle()
    assert with_all > without_memory > opened.page.evaluate(height)
    assert "send" not in opened.told(0, 1.1, down=27.0)
    assert "backward, micro-batch 1" in opened.told(2, 10.0)


def test_what_is_not_there_cannot_be_toggled(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "timeline.html"
    write_timeline(path, Timeline((Event(0, "F", 0, 0, 0.0, 1.0),), 1))
    opened = opened_page(browser, path)
    assert not opened.page.locator("#with-memory").is_visible()
    assert not opened.page.locator("#with-messages").is_visible()
    opened.page.close()


def test_a_dark_system_gets_dark_colours(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "timeline.html"
    write_timeline(path, SMALL)
    opened = opened_page(browser, path, color_scheme="dark")
    assert opened.colour(0, 0.9) == (0x2B, 0x86, 0xC5)
    assert opened.colour(0, 7.0) == (0x20, 0x29, 0x33)
    opened.page.close()


def test_many_devices_scroll_and_many_blocks_are_drawn_by_columns(
    browser: Browser, tmp_path: Path
) -> None:
    shape = PipelineShape(stages=48, micro_batches=192)
    path = tmp_path / "timeline.html"
    write_timeline(path, timeline_with_messages(one_f_one_b(shape), shape))
    opened = opened_page(browser, path)
    assert opened.complaints == []
    opened.page.evaluate("view.scrollTop = rowHeight() * 40")
    opened.settle()
    assert "device 40" in opened.told(40, 100.5)
    opened.page.evaluate("setRange(100, 20)")
    opened.settle()
    assert "device 41, stage 41" in opened.told(41, 104.5)
    narrow = opened.page.evaluate(
        "() => document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert narrow
    opened.page.close()


def test_numbers_keep_nine_digits() -> None:
    assert rounded(0.1 + 0.2) == 0.3
    assert rounded(123456789012.0) == 123456789000.0
