import os
import pty
import subprocess
import sys

import pytest

from penstock.commands.progress import lines_at_times, planning_progress, step_words
from penstock.commands.terminal import Terminal
from penstock.plan.plan import Plan
from penstock.planners.search.judge import SearchStep


def test_a_step_says_what_is_done_and_how_good_the_best_is(small_plan: Plan) -> None:
    first = SearchStep("planner spp", None, float("inf"))
    assert step_words(first, "search", 1.0) == "search: planner spp"
    found = SearchStep("hill climbing", small_plan, 1.25)
    assert step_words(found, "", 1.0) == "hill climbing; best 1.25 s, 25.0 % above the bound"
    assert step_words(found, "", 0.0) == "hill climbing; best 1.25 s"


def test_lines_come_at_most_every_two_seconds() -> None:
    times = iter([0.0, 1.0, 2.5, 3.0, 5.0])
    told: list[str] = []
    with lines_at_times(told.append, lambda: next(times)) as show:
        for words in ("a", "b", "c", "d"):
            show(words)
    assert told == ["    2 s  b", "    5 s  d"]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str], small_plan: Plan) -> None:
    with planning_progress(Terminal(as_json=False, quiet=True)) as progress:
        progress.show_step(SearchStep("x", small_plan, 1.0))
        progress.note("y")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_on_a_terminal_one_line_is_overwritten_and_the_answer_stays_alone(
    problem: list[str],
) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "plan", *problem]
    done = subprocess.run(
        [*command, "--planner", "single-device", "--json"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=os.environ | {"TERM": "xterm"},
        text=True,
        check=True,
    )
    os.close(slave)
    shown = os.read(master, 100_000).decode()
    os.close(master)
    assert done.stdout.count("\n") == 1 and done.stdout.startswith("{")
    assert "\x1b[2K" in shown and "planning" in shown
