import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest
from made_timelines import timeline_with_messages

from penstock.report.device_rows import gantt_rows
from penstock.report.drawing import Drawing, drawing_svg
from penstock.report.gantt_drawing import gantt_drawing
from penstock.report.palette import THEMES
from penstock.schedule.families.early_backward import gpipe, one_f_one_b
from penstock.schedule.shape import PipelineShape
from penstock.timeline.timeline import Event, MemorySample, Timeline

SVG = "{http://www.w3.org/2000/svg}"
SHAPE = PipelineShape(stages=4, micro_batches=8)
SMALL = timeline_with_messages(one_f_one_b(SHAPE), SHAPE)


def drawn(timeline: Timeline, limits: tuple[float, ...] = ()) -> Drawing:
    return gantt_drawing(gantt_rows(timeline, limits), "title <a>", "note & more")


def nodes(drawing: Drawing) -> list[ET.Element]:
    return list(ET.fromstring(drawing_svg(drawing)).iter())


def words(drawing: Drawing) -> list[str]:
    return [node.text for node in nodes(drawing) if node.tag == f"{SVG}text" and node.text]


def labelled(drawing: Drawing) -> list[tuple[ET.Element, str]]:
    found = [(node, node.findtext(f"{SVG}title")) for node in nodes(drawing)]
    return [(node, label) for node, label in found if label]


def place(node: ET.Element, *names: str) -> list[float]:
    return [float(node.get(name, "nan")) for name in names]


def test_every_event_is_a_block_of_its_kind_where_it_belongs() -> None:
    blocks = labelled(drawn(SMALL))
    kinds = Counter((node.get("class") or "")[:-1] for node, _ in blocks)
    assert kinds == Counter(event.kind for event in SMALL.events)
    end_s = max(event.end_s for event in SMALL.events)
    spans = {label: place(node, "x", "width") for node, label in blocks}
    x, width = spans["device 2: backward, stage 2, micro-batch 1, 9.00 s to 11.0 s"]
    left, right = 180.0, 1332.0
    assert x == pytest.approx(left + 9 / end_s * (right - left), abs=0.1)
    assert width == pytest.approx(2 / end_s * (right - left), abs=1.0)


def test_messages_are_thin_and_under_their_device() -> None:
    blocks = labelled(drawn(SMALL))
    tops = {
        device: min(place(n, "y")[0] for n, text in blocks if text.startswith(f"device {device}:"))
        for device in range(4)
    }
    for node, label in blocks:
        device = int(label.partition(":")[0].removeprefix("device "))
        y, height = place(node, "y", "height")
        if "send" in label or "receive" in label:
            assert height < 6
            assert y > tops[device] + 20
            assert device == 3 or y < tops[device + 1]
            assert "4.00 MB" in label and "device" in label.partition(":")[2]


def test_title_devices_axis_and_legend_are_told() -> None:
    told = words(drawn(SMALL))
    assert {"title <a>", "note & more", "device 0", "stage 3", "0 s", "34.5 s"} <= set(told)
    assert {"forward", "backward", "optimizer step", "send", "gradient all-reduce"} <= set(told)
    assert "recompute" not in told


def test_numbers_stand_on_blocks_that_have_room() -> None:
    numbers = Counter(word for word in words(drawn(SMALL)) if word.isdigit())
    assert numbers == {str(m): 2 * 4 for m in range(8)}


def test_memory_has_a_strip_for_each_device_and_the_limit_where_it_is_near() -> None:
    drawing = drawn(SMALL, (5.0, 5.0, 1e9, 0.0))
    told = words(drawing)
    assert "peak 4 B of 5 B" in told and "peak 2 B of 1.00 GB" in told and "peak 1 B" in told
    lines = [node for node in nodes(drawing) if node.get("class") == "line-limit"]
    assert len(lines) == 2
    curves = [node for node in nodes(drawing) if node.get("class") == "line line-F0"]
    assert len(curves) == 4
    for curve in curves:
        xs = [float(x) for x, _ in re.findall(r"([0-9.]+) ([0-9.]+)", curve.get("d") or "")]
        assert xs == sorted(xs) and xs[0] >= 180 and xs[-1] == pytest.approx(1332)


def test_a_peak_between_two_pixels_is_seen() -> None:
    samples = [MemorySample(0, i / 10_000, 5.0) for i in range(10_000)]
    samples[5000] = MemorySample(0, 0.5, 10.0)
    timeline = Timeline((Event(0, "F", 0, 0, 0.0, 1.0),), 1, tuple(samples))
    curve = next(n for n in nodes(drawn(timeline)) if n.get("class") == "line line-F0")
    heights = [float(y) for _, y in re.findall(r"([0-9.]+) ([0-9.]+)", curve.get("d") or "")]
    assert len(heights) < 5000
    base = max(heights) + (max(heights) - min(heights))
    assert base - min(heights) == pytest.approx(2 * (base - max(heights)), rel=0.02)


@pytest.mark.parametrize(
    ("devices", "micro_batches"), [(4, 4), (4, 256), (16, 32), (64, 4), (64, 256)]
)
def test_any_size_is_drawn_whole_and_small(devices: int, micro_batches: int) -> None:
    shape = PipelineShape(stages=devices, micro_batches=micro_batches)
    drawing = drawn(timeline_with_messages(one_f_one_b(shape), shape))
    text = drawing_svg(drawing)
    assert len(text) < 900_000
    assert len(nodes(drawing)) < 8_000
    told = words(drawing)
    assert {f"device {device}" for device in range(devices)} <= set(told)
    assert drawing.height < 1300
    for node in nodes(drawing):
        x, y, width, height = place(node, "x", "y", "width", "height")
        assert not x < 0 and not x + width > drawing.width
        assert not y < 0 and not y + height > drawing.height


def test_labels_do_not_overlap() -> None:
    for devices in (4, 8, 9, 16, 17, 32, 33, 64):
        shape = PipelineShape(stages=devices, micro_batches=4)
        drawing = drawn(timeline_with_messages(gpipe(shape), shape))
        texts = [n for n in nodes(drawing) if n.tag == f"{SVG}text"]
        names = [n for n in texts if (n.text or "").startswith("device ")]
        ys = sorted(place(n, "y")[0] for n in names)
        size = min(place(n, "font-size")[0] for n in names)
        assert all(b - a >= size for a, b in pairwise(ys))


def test_blocks_narrower_than_a_pixel_keep_their_time() -> None:
    events = tuple(
        Event(0, kind, 0, m, 2 * m + start, 2 * m + start + long)
        for m in range(5000)
        for kind, start, long in (("F", 0.0, 0.5), ("B", 0.5, 1.0))
    )
    drawing = drawn(Timeline(events, 1))
    paths = [n for n in nodes(drawing) if (n.get("class") or "").startswith("line line-B")]
    covered = sum(
        float(width) * float(node.get("opacity", 1))
        for node in paths
        for width in re.findall(r"h([0-9.]+)", node.get("d") or "")
    )
    assert covered == pytest.approx(0.75 * 1152, rel=0.05)


def test_more_devices_than_fit_say_how_many_are_left_out() -> None:
    shape = PipelineShape(stages=100, micro_batches=2)
    told = words(drawn(timeline_with_messages(gpipe(shape), shape)))
    assert "... 36 more rows ..." in told
    assert "device 31" in told and "device 32" not in told
    assert "device 67" not in told and "device 68" in told


def test_dark_colours_are_those_of_the_dark_theme() -> None:
    light, _, dark = drawing_svg(drawn(SMALL)).partition("prefers-color-scheme: dark")
    assert f".F0 {{ fill: {THEMES['light'].kinds['F']}; }}" in light
    assert f".F0 {{ fill: {THEMES['dark'].kinds['F']}; }}" in dark
    assert f".paper {{ fill: {THEMES['dark'].inks['paper']}; }}" in dark


def test_mirrored_copies_are_told_apart_by_direction() -> None:
    events = tuple(
        Event(device, "F", stage, m, float(start), start + 1.0)
        for device, stage, m, start in ((0, 0, 0, 0), (1, 1, 0, 1), (1, 0, 1, 0), (0, 1, 1, 1))
    )
    chart = gantt_rows(Timeline(events, 2))
    assert chart.mirrored
    shades = {b.event.micro_batch: b.style.shade for row in chart.rows for b in row.compute[0]}
    assert shades == {0: 0, 1: 1}
    assert any("odd micro-batches" in text for text in words(drawn(Timeline(events, 2))))


def test_replicas_are_no_mirror() -> None:
    events = tuple(Event(d, "F", 0, m, float(m), m + 1.0) for d in (0, 1) for m in (0, 1))
    assert not gantt_rows(Timeline(events, 2)).mirrored


def test_nothing_to_draw_is_drawn_without_complaint() -> None:
    assert "title <a>" in words(drawn(Timeline((), 2)))
