"""A search with all choices against searches with fewer, on six random problems."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "planning"))

from consistency import LIMITS, row_of  # type: ignore[import-not-found]
from random_problems import random_problem  # type: ignore[import-not-found]

PROBLEMS, SCHEDULES, EFFORT = range(6), 2, 0.5
"""Half of the budget: a test of half a minute. The benchmark asks with all of it."""


def test_the_search_is_seldom_behind_itself_with_fewer_choices() -> None:
    rows = [row_of(random_problem(77, k), k, SCHEDULES, EFFORT) for k in PROBLEMS]
    behind = [row for row in rows if row.behind > LIMITS[0]]
    assert len(behind) <= 1, behind
    assert max(row.behind for row in rows) <= LIMITS[1], behind
