import re

import pytest
from made_timelines import schedule_timeline, timeline_with_messages

from penstock.report.gantt_text import gantt, terminal_code
from penstock.schedule.families.early_backward import gpipe, one_f_one_b
from penstock.schedule.schedule import Schedule, parse_schedule
from penstock.schedule.shape import PipelineShape
from penstock.timeline.palette import LIGHT, Style, fill_of
from penstock.timeline.timeline import Event, Timeline

CODE = re.compile(r"\x1b\[[0-9;]*m")

SMALL = PipelineShape(stages=3, micro_batches=4)

ONE_F_ONE_B = """\
device 0  F0-F1-F2-............B0----F3-B1----...B2----...B3----
device 1  ...F0-F1-......B0----F2-B1----F3-B2----...B3----......
device 2  ......F0-B0----F1-B1----F2-B2----F3-B3----............
          0 s            5 s            10 s           15 s
F forward  B backward  . idle
18.0 s, bubble 33.3 %"""


def test_a_small_schedule_without_colours_is_exactly_this() -> None:
    assert gantt(schedule_timeline(one_f_one_b(SMALL), SMALL), 64, colour=False) == ONE_F_ONE_B


def test_colours_say_the_kind_and_numbers_the_micro_batch() -> None:
    chart = gantt(schedule_timeline(one_f_one_b(SMALL), SMALL), 64)
    first = chart.splitlines()[0]
    codes = {"F": terminal_code(LIGHT.kinds["F"]), "B": terminal_code(LIGHT.kinds["B"])}
    order = ("F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3")
    assert re.findall(r"48;5;(\d+);38;5;\d+m *(\d+) *\x1b", first) == [
        (str(codes[kind]), number) for kind, number in order
    ]
    plain = CODE.sub("", chart).splitlines()
    assert plain[3] == ONE_F_ONE_B.splitlines()[3]


@pytest.mark.parametrize("width", [40, 80, 133])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    shape = PipelineShape(stages=12, micro_batches=30)
    timeline = timeline_with_messages(gpipe(shape), shape)
    lines = CODE.sub("", gantt(timeline, width, colour)).splitlines()
    assert max(map(len, lines[:12])) == width
    assert max(map(len, lines)) <= width


def test_without_colours_there_is_no_escape_code() -> None:
    assert "\x1b" not in gantt(schedule_timeline(gpipe(SMALL), SMALL), 64, colour=False)


def test_stages_of_a_device_are_told_apart() -> None:
    shape = PipelineShape(stages=2, micro_batches=1, placement=(0, 0))
    timeline = schedule_timeline(parse_schedule("stage 0,1 0F0 1F0 1B0 0B0"), shape)
    plain = gantt(timeline, 28, colour=False).splitlines()
    assert plain[0] == "device 0  F0-f0-b0----B0----"
    assert "capital, small letters in turn: the 2 stages of a device" in plain
    coloured = gantt(timeline, 28)
    for style in (Style("F", 0, 2), Style("F", 1, 2), Style("B", 1, 2)):
        assert f"48;5;{terminal_code(fill_of(style, LIGHT))};" in coloured


def test_many_devices_say_how_many_are_left_out() -> None:
    shape = PipelineShape(stages=40, micro_batches=4)
    lines = gantt(schedule_timeline(gpipe(shape), shape), 80, False, most_rows=5).splitlines()
    assert [line[:9] for line in lines[:6]] == [
        "device 0 ",
        "device 1 ",
        "device 2 ",
        "         ",
        "device 38",
        "device 39",
    ]
    assert lines[3].strip() == "... 35 more devices ..."


def test_forwards_beside_backwards_have_a_line_each() -> None:
    shape = PipelineShape(stages=1, micro_batches=2)
    schedule = Schedule(gpipe(shape).orders, concurrent=True)
    lines = gantt(schedule_timeline(schedule, shape), 34, colour=False).splitlines()
    # Alone an action has the whole device; F1 and B0 share it by their work, 1 to 2.
    assert lines[0] == "device 0  F0--F1----------........"
    assert lines[1] == "          ....B0----------B1------"


def test_steps_count_but_messages_are_not_drawn() -> None:
    timeline = timeline_with_messages(one_f_one_b(SMALL), SMALL)
    chart = gantt(timeline, 100, colour=False)
    assert "S optimizer step" in chart and "send" not in chart
    assert "19.5 s" in chart


def test_a_timeline_without_work_says_so() -> None:
    assert gantt(Timeline((), 4)) == "nothing is computed"


def test_very_short_iterations_have_an_axis() -> None:
    chart = gantt(Timeline((Event(0, "F", 0, 0, 0.0, 3e-7),), 1), 60, colour=False)
    assert "0.1 µs" in chart
