"""Random problems of the planning benchmark: drawn alike each time, and told as they were found."""

from typing import Any

import pytest
from scripts import script_at


@pytest.fixture(scope="module")
def drawn() -> Any:
    return script_at("benchmarks/planning/random_problems.py", "random_problems_drawn")


def test_a_seed_always_draws_the_same_problems_and_others_than_another(drawn: Any) -> None:
    first, same, other = (drawn.random_problem(seed, 5) for seed in (1, 1, 2))
    assert (first.profile, first.cluster) == (same.profile, same.cluster)
    assert (first.profile, first.cluster) != (other.profile, other.cluster)
    drawn_devices = {len(drawn.random_problem(3, n).cluster.devices) for n in range(40)}
    assert drawn_devices <= set(range(2, 33)) and len(drawn_devices) > 5


def test_a_row_says_where_search_is_behind(drawn: Any) -> None:
    row = drawn.random_row(1, 6)
    assert "BEHIND" not in drawn.random_words(row)
    best = row["search"]["seconds"]
    row["alone"]["zb-v"] = {"seconds": 0.99 * best, "schedule": "zb-v", "cpu_s": 0.0}
    assert "BEHIND alone 1.01 %: zb-v" in drawn.random_words(row)
    assert "| 1 | 1 | 0 | 1 |" in drawn.random_table([row])[2]
