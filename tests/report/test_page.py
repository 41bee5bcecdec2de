import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from penstock.plan.plan import Plan, Stage
from penstock.report.page import page_html, write_report
from penstock.report.record import RunRecord, read_run
from penstock.simulate.simulation import simulate_plan
from penstock.timeline.json_file import read_timeline
from penstock.timeline.metrics import COMPUTE
from penstock.words import seconds_text

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


class Opened:
    """The report of a run in a browser, with everything that it asked for or complained of."""

    def __init__(self, page: Page, report: Path) -> None:
        self.page, self.requests, self.complaints = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(report.as_uri())
        page.wait_for_selector(".bar")

    def bars(self, panel: str) -> int:
        return self.page.locator(f'[data-panel="{panel}"] .bar').count()


@pytest.fixture
def opened(browser: Browser, run_directory: Path) -> Iterator[Opened]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    yield Opened(page, write_report(run_directory))
    page.close()


def test_the_page_opens_without_complaints_and_asks_for_nothing_else(
    opened: Opened, run_directory: Path
) -> None:
    assert opened.complaints == []
    assert opened.requests == [(run_directory / "report.html").as_uri()]


def test_every_event_of_both_timelines_is_a_bar(opened: Opened, run_directory: Path) -> None:
    for name in ("predicted", "measured"):
        events = read_timeline(run_directory / f"{name}.json").events
        assert len(events) > 40
        assert opened.bars(name) == len(events)


def test_both_timelines_share_one_time_axis_with_the_predicted_one_above(opened: Opened) -> None:
    first, second = (
        opened.page.locator(f'[data-panel="{name}"] .bar.F').first.bounding_box()
        for name in ("predicted", "measured")
    )
    assert first is not None and second is not None
    assert first["x"] == pytest.approx(second["x"], abs=0.5)
    assert first["y"] < second["y"]


def test_a_bar_tells_its_exact_times(opened: Opened, run_directory: Path) -> None:
    event = read_timeline(run_directory / "predicted.json").events[0]
    opened.page.locator('[data-panel="predicted"] .bar').first.hover()
    text = opened.page.locator("#tip").inner_text()
    assert f"{event.end_s * 1e3:.3f} ms" in text
    assert f"micro-batch {event.micro_batch}" in text


def test_dragging_zooms_both_timelines_and_the_button_shows_all_again(opened: Opened) -> None:
    opened.page.evaluate("document.getElementById('timelines').scrollIntoView()")
    box = opened.page.locator("#timelines").bounding_box()
    assert box is not None
    before = opened.page.locator(".bar.F").first.bounding_box()
    mouse, y = opened.page.mouse, box["y"] + 60
    mouse.move(box["x"] + 130, y)
    mouse.down()
    mouse.move(box["x"] + 400, y)
    mouse.up()
    wider = opened.page.locator(".bar.F").first.bounding_box()
    assert before is not None and wider is not None and wider["width"] > 2 * before["width"]
    opened.page.locator("#reset-zoom").click()
    again = opened.page.locator(".bar.F").first.bounding_box()
    assert again is not None
    assert (again["x"], again["width"]) == (before["x"], before["width"])


def test_memory_loss_and_throughput_are_drawn(opened: Opened) -> None:
    page = opened.page
    assert page.locator("#loss path.line").count() == 2
    assert page.locator("#throughput path.line").count() == 1
    for device in range(4):
        assert page.locator(f"#memory-{device} path.line").count() == 1
        assert page.locator(f"#memory-{device} .level.measured-peak").count() == 1


@pytest.mark.parametrize("width", [800, 1280])
def test_nothing_is_cut_off_at_the_side(opened: Opened, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.wait_for_function(
        "w => document.getElementById('timelines').querySelector('.row').getBoundingClientRect()"
        ".right <= w",
        arg=width,
    )
    for place in (
        "document.documentElement",
        *(f"document.querySelectorAll('.wide')[{i}]" for i in (0, 1)),
    ):
        assert opened.page.evaluate(f"{place}.scrollWidth <= {place}.clientWidth + 1")


def test_the_page_says_prediction_measurement_and_error(run_directory: Path) -> None:
    summary = json.loads((run_directory / "summary.json").read_text())
    page = write_report(run_directory).read_text()
    error = abs(summary["predicted_s"] / summary["measured_s"] - 1) * 100
    assert f"{error:.1f} %" in page
    assert seconds_text(summary["predicted_s"]) in page
    assert seconds_text(summary["measured_s"]) in page
    assert "slower than predicted" in page


def test_lengths_have_a_table_of_their_own_and_a_mean(
    browser: Browser, run_directory: Path
) -> None:
    place = run_directory / "summary.json"
    assert "Lengths of the batches" not in page_html(read_run(run_directory))
    rows = [
        {
            "lengths": {"length": 16},
            "share": 0.75,
            "predicted_s": 0.11,
            "measured_s": 0.1,
            "steps": 9,
        },
        {
            "lengths": {"length": 512},
            "share": 0.25,
            "predicted_s": 0.5,
            "measured_s": 0,
            "steps": 0,
        },
    ]
    place.write_text(json.dumps(json.loads(place.read_text()) | {"by_length": rows}))
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    opened = Opened(page, write_report(run_directory))
    found = page.locator("section", has_text="Lengths of the batches").locator("tbody tr")
    assert found.all_inner_texts() == [
        "length 16\t75.0 %\t110 ms\t100 ms\t+10.0 %\t9",
        "length 512\t25.0 %\t500 ms\tno such step\t\t0",
    ]
    assert "mean over the lengths" in page.inner_text(".tiles")
    assert opened.complaints == []
    page.close()


def test_names_are_shown_as_they_are_whatever_they_hold(run_directory: Path) -> None:
    page = write_report(run_directory).read_text()
    assert "small &amp; &lt;tidy&gt;" in page
    assert "head &lt;loss&gt;" in page
    assert "<loss>" not in page and "<tidy>" not in page


def test_the_page_is_well_formed_and_names_no_address(run_directory: Path) -> None:
    page = write_report(run_directory).read_text()
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert "link" in tags and "img" not in tags
    outside = re.findall(r"https?://[^\s\"'<]+", page)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_a_run_without_measured_memory_says_so(run_directory: Path) -> None:
    path = run_directory / "summary.json"
    summary = json.loads(path.read_text()) | {"measured_peak_memory_bytes": [0, 0, 0, 0]}
    path.write_text(json.dumps(summary))
    assert "not measured" in write_report(run_directory).read_text()


def looped(record: RunRecord) -> RunRecord:
    """The run with two stages on each of two devices."""
    stages = tuple(Stage(range(2 * s, 2 * s + 2), (s % 2,), (2,)) for s in range(4))
    plan = Plan(stages, 4, 2, "interleaved")
    timeline = simulate_plan(plan, record.profile, record.cluster).timeline
    return replace(record, plan=plan, predicted=timeline, measured=timeline)


def test_a_device_of_several_stages_has_one_row_with_all_its_work(
    browser: Browser, run_directory: Path, tmp_path: Path
) -> None:
    record = looped(read_run(run_directory))
    path = tmp_path / "looped.html"
    path.write_text(page_html(record))
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    opened = Opened(page, path)
    assert opened.complaints == []
    names = page.locator("#timelines .row-name").all_text_contents()
    assert names == ["device 0stages 0, 2", "device 1stages 1, 3"] * 2
    assert opened.bars("predicted") == len(record.predicted.events)
    pale = page.locator('[data-panel="predicted"] .bar.pale').count()
    upper = sum(e.stage >= 2 and e.kind in COMPUTE - {"STEP"} for e in record.predicted.events)
    assert pale == upper > 0
    assert "pale: every second stage of a device" in page.locator(".legend").first.inner_text()
    assert page.locator("[id='memory-0']").count() == 1
    page.close()
