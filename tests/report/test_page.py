import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from opened_page import OpenedPage

from penstock.cluster.cluster import with_devices
from penstock.plan.plan import Plan, Stage
from penstock.report.page import page_html, write_report
from penstock.report.record import MeasuredLength, RunRecord, read_run
from penstock.simulate.simulation import simulate_plan
from penstock.text import seconds_text
from penstock.timeline.metrics import COMPUTE, iteration_s
from penstock.timeline.palette import LIGHT, TINTS


def change_summary(run_directory: Path, **changes: object) -> None:
    """Put values into the summary of a run; None takes one out."""
    path = run_directory / "summary.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


@pytest.fixture
def opened(open_page: Callable[..., OpenedPage], run_directory: Path) -> OpenedPage:
    return open_page(write_report(run_directory))


def test_both_timelines_share_one_time_axis_with_the_predicted_one_above(
    opened: OpenedPage, run_directory: Path
) -> None:
    record = read_run(run_directory)
    titles = [text for text in opened.words() if ": " in text]
    predicted_s, measured_s = (iteration_s(t) for t in (record.predicted, record.measured))
    assert titles == [
        f"Predicted: {seconds_text(predicted_s)}",
        f"Measured: {seconds_text(measured_s)}",
    ]
    assert opened.seen_s() == (0.0, pytest.approx(measured_s))
    upper, lower = (opened.place(row, predicted_s) for row in (0, 4))
    assert upper[0] == lower[0] and upper[1] < lower[1]
    # The prediction is shorter: a dark dashed line marks its end, in its own rows only.
    darkest = [
        min(opened.colour(row, predicted_s, float(down)) for down in range(20)) for row in (0, 4)
    ]
    assert darkest[0] < "#88" and darkest[1] > "#d0"


def test_a_block_tells_its_exact_times(opened: OpenedPage, run_directory: Path) -> None:
    event = read_run(run_directory).predicted.events[-1]
    assert f"{event.start_s * 1e3:.3f} ms to {event.end_s * 1e3:.3f} ms" in opened.told_of(
        event.device, event
    )


def test_the_wheel_alone_scrolls_the_page(opened: OpenedPage) -> None:
    whole_s = opened.seen_s()
    opened.page.mouse.move(*opened.place(1, 0.05))
    opened.page.mouse.wheel(0, 200)
    opened.page.wait_for_function("() => window.scrollY > 0")
    assert opened.seen_s() == whole_s


def test_memory_loss_and_throughput_are_drawn(opened: OpenedPage) -> None:
    page = opened.page
    assert page.locator("#loss path.line").count() == 2
    assert page.locator("#throughput path.line").count() == 1
    for device in range(4):
        assert page.locator(f"#memory-{device} path.line").count() == 1
        assert page.locator(f"#memory-{device} .level.measured-peak").count() == 1


def test_the_page_says_where_when_and_how_it_ran(
    open_page: Callable[..., OpenedPage], run_directory: Path
) -> None:
    rows = open_page(write_report(run_directory)).page.locator(".run tr").all_inner_texts()
    assert dict(row.split("\t") for row in rows) == {
        "Plan": "by planner search, schedule 1f1b",
        "Devices": "4 x cpu",
        "Machine": "host-7, first of 2 hosts: a <processor>, 4 cores, 8.00 GB",
        "Load": "0.2 before, 4.5 at the end, on average over a minute",
        "Versions": "penstock 1.0, torch 2.13.0",
        "Command": "penstock train small --workers 4",
        "Begun": "2026-11-27 10:48 UTC",
    }


def test_a_run_of_an_older_version_has_a_report_too(run_directory: Path) -> None:
    change_summary(run_directory, circumstances=None)
    page = page_html(read_run(run_directory))
    assert "4 x cpu" in page and "Versions" not in page


def test_throughput_is_in_tokens_where_they_are_known(run_directory: Path) -> None:
    record = read_run(run_directory)
    assert "samples per second" in page_html(record) and "tokens per second" not in page_html(
        record
    )
    of_text = replace(record, profile=replace(record.profile, tokens_per_sample=64.0))
    assert '6.53 k</div><div class="more">tokens per second, 102 samples' in page_html(of_text)


@pytest.mark.parametrize("width", [420, 800, 1280])
def test_nothing_is_cut_off_at_the_side(opened: OpenedPage, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.settle()
    chart = opened.page.locator("#chart").bounding_box()
    assert chart is not None and chart["x"] + chart["width"] <= width
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
    open_page: Callable[..., OpenedPage], run_directory: Path
) -> None:
    assert "Lengths of the batches" not in page_html(read_run(run_directory))
    rows = [
        MeasuredLength({"length": 16}, 0.75, 0.11, 0.1, 9),
        MeasuredLength({"length": 512}, 0.25, 0.5, 0.0, 0),
    ]
    change_summary(run_directory, by_length=[asdict(row) for row in rows])
    opened = open_page(write_report(run_directory))
    found = opened.page.locator("section", has_text="Lengths of the batches").locator("tbody tr")
    assert found.all_inner_texts() == [
        "length 16\t75.0 %\t110 ms\t100 ms\t+10.0 %\t9",
        "length 512\t25.0 %\t500 ms\tno such step\t\t0",
    ]
    assert "mean over the lengths" in opened.page.inner_text(".tiles")
    assert opened.complaints == []


def test_names_are_shown_as_they_are_whatever_they_hold(run_directory: Path) -> None:
    page = write_report(run_directory).read_text()
    assert "small &amp; &lt;tidy&gt;" in page
    assert "head &lt;loss&gt;" in page
    assert "<loss>" not in page and "<tidy>" not in page


def test_a_run_without_measured_memory_says_so(run_directory: Path) -> None:
    change_summary(run_directory, measured_peak_memory_bytes=[0, 0, 0, 0])
    assert "not measured" in write_report(run_directory).read_text()


def test_a_memory_limit_is_drawn_and_named_if_it_is_near(
    open_page: Callable[..., OpenedPage], run_directory: Path, tmp_path: Path
) -> None:
    record = read_run(run_directory)
    tight = with_devices(record.cluster, lambda device: replace(device, memory_bytes=30e6))
    near = replace(record, cluster=tight)
    for number, (shown, drawn) in enumerate(((record, 0), (near, 1))):
        path = tmp_path / f"{number}.html"
        path.write_text(page_html(shown))
        opened = open_page(path)
        assert opened.page.locator("#memory-1 .limit").count() == drawn
        section = opened.page.locator("section", has_text="Memory of each device")
        names = section.locator(".legend li").all_inner_texts()
        assert names == ["predicted over the iteration", "measured peak"] + ["limit"] * drawn


def test_a_stage_that_is_held_twice_lists_all_its_devices(run_directory: Path) -> None:
    record = read_run(run_directory)
    stages = tuple(Stage(range(4 * s, 4 * s + 4), (s,), (2,)) for s in range(2))
    plan = Plan(stages, 4, 2, "chimera")
    timeline = simulate_plan(plan, record.profile, record.cluster).timeline
    page = page_html(replace(record, plan=plan, predicted=timeline, measured=timeline))
    first, second = "<span>0 (cpu)</span>", "<span>1 (cpu)</span>"
    assert f"{first}<br>{second}" in page and f"{second}<br>{first}" in page


def looped(record: RunRecord) -> RunRecord:
    """The run with two stages on each of two devices."""
    stages = tuple(Stage(range(2 * s, 2 * s + 2), (s % 2,), (2,)) for s in range(4))
    plan = Plan(stages, 4, 2, "interleaved")
    timeline = simulate_plan(plan, record.profile, record.cluster).timeline
    return replace(record, plan=plan, predicted=timeline, measured=timeline)


def test_a_device_of_several_stages_has_one_row_with_all_its_work(
    open_page: Callable[..., OpenedPage], run_directory: Path, tmp_path: Path
) -> None:
    record = looped(read_run(run_directory))
    path = tmp_path / "looped.html"
    path.write_text(page_html(record))
    opened = open_page(path)
    assert opened.complaints == []
    words = opened.words()
    names = [text for text in words if text.startswith(("device", "stages"))]
    assert names == ["device 0", "stages 0, 2", "device 1", "stages 1, 3"] * 2
    for event in record.predicted.events:
        tinted = event.stage >= 2 and event.kind in COMPUTE
        colour = TINTS[event.kind] if tinted else LIGHT.kinds[event.kind]
        assert opened.colour_of(event.device, event) == colour
    legend = opened.page.locator(".legend").first
    assert "dark to light: the 2 stages of a device" in legend.inner_text()
    assert opened.page.locator("[id='memory-0']").count() == 1
