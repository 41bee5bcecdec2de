"""A planner's answer within a time limit, also from planners that do not look at the clock."""

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import Any

from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planning.answers import TimeLimit, find_plan
from penstock.search.step import SearchStep

__all__ = ["TimeIsUp", "plan_within"]

PATIENCE = 1.25
"""A planner that has not stopped by itself after so many times its limit is stopped."""

RETRY_S = 1.0
"""Seconds between alarms while a planner may not be stopped yet."""


class TimeIsUp(Exception):
    """A planner was stopped before it had a plan."""


def plan_within(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    *,
    limit: TimeLimit | None = None,
    on_step: Callable[[SearchStep], None] | None = None,
    may_fail: bool = False,
) -> Plan:
    """`find_plan`, stopped soon after the limit even where the planner does not look at the clock.

    Then the best plan that it reported is the answer. If it reported none, it continues until it
    does, unless it ``may_fail``. Planners can be stopped in the main thread only.

    Raises:
        BadInput: no planner has the name.
        Infeasible: nothing fits; the message says what would.
        TimeIsUp: it was stopped without a plan.
    """
    best: Plan | None = None

    def keep_best(step: SearchStep) -> None:
        nonlocal best
        best = step.plan or best
        if on_step:
            on_step(step)

    try:
        with stopped_after(
            limit.seconds * PATIENCE if limit else inf, lambda: may_fail or best is not None
        ):
            return find_plan(problem, planner, score, limit=limit, on_step=keep_best)
    except TimeIsUp:
        if best is None:
            raise
        return best


@contextmanager
def stopped_after(seconds: float, may_stop: Callable[[], bool]) -> Generator[None]:
    """Raise `TimeIsUp` in the block once ``seconds`` have passed and ``may_stop``."""
    is_main = threading.current_thread() is threading.main_thread()
    if seconds == inf or not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if may_stop():
            raise TimeIsUp

    def without_ours(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, TimeIsUp):
            tell(ignored)

    # Where the alarm comes while an object is deleted, Python prints the exception and goes on. The
    # next alarm stops the planner.
    tell, sys.unraisablehook = sys.unraisablehook, without_ours
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), RETRY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = tell
