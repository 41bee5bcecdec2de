"""Progress of a planner on standard error: a live line on a terminal, else a line at times."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import inf
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.commands.terminal import Terminal
from penstock.waiting import PATIENCE_S

if TYPE_CHECKING:
    from penstock.planners.search.judge import SearchStep

SECONDS_BETWEEN_LINES = 2.0
"""Least seconds between lines if standard error is not a terminal."""

REFRESHES_PER_S = 5


class PlanningProgress:
    """Display of search steps and notes through two functions; see `planning_progress`."""

    def __init__(self, show: Callable[[str], None], note: Callable[[str], None]) -> None:
        self.show, self.note, self.bound_s = show, note, 0.0

    def show_step(self, step: "SearchStep", planner: str = "") -> None:
        self.show(step_words(step, planner, self.bound_s))


@contextmanager
def planning_progress(terminal: Terminal) -> Generator[PlanningProgress]:
    """Progress during the block; silent if the terminal is quiet."""
    if terminal.quiet:
        yield PlanningProgress(terminal.note, terminal.note)
    elif sys.stderr.isatty():
        with live_line() as (show, note):
            yield PlanningProgress(show, note)
    else:
        with lines_at_times(terminal.note, perf_counter) as show:
            yield PlanningProgress(show, terminal.note)


def step_words(step: "SearchStep", planner: str, bound_s: float) -> str:
    """The current work of a planner, and the best plan so far, in words."""
    from penstock.text import percent_text, seconds_text

    words = f"{planner}: {step.doing}" if planner and planner not in step.doing else step.doing
    if step.plan is None or step.seconds == inf:
        return words
    words += f"; best {seconds_text(step.seconds)}"
    if bound_s > 0:
        words += f", {percent_text(step.seconds / bound_s - 1)} above the bound"
    return words


@contextmanager
def lines_at_times(
    note: Callable[[str], None], clock: Callable[[], float]
) -> Generator[Callable[[str], None]]:
    """Pass words to ``note`` with the seconds that have passed, at most every few seconds.

    While nothing new comes during the block, the last words are repeated.
    """
    start_s = last_s = clock()
    latest, over = "preparing", Event()

    def show(words: str) -> None:
        nonlocal last_s, latest
        latest, now_s = words, clock()
        if now_s - last_s >= SECONDS_BETWEEN_LINES:
            last_s = now_s
            note(f"{now_s - start_s:5.0f} s  {words}")

    def repeat() -> None:
        while not over.wait(PATIENCE_S):
            show(latest)

    Thread(target=repeat, daemon=True).start()
    try:
        yield show
    finally:
        over.set()


@contextmanager
def live_line() -> Generator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A line that is overwritten, with a running clock, and notes above it."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=REFRESHES_PER_S
    ) as line:
        task = line.add_task("planning")
        yield (
            lambda words: line.update(task, description=words),
            lambda words: console.print(words, markup=False),
        )
