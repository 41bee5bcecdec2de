"""README and pages have the figures that were recorded last."""

import json
from pathlib import Path
from statistics import mean, median

import pytest

ROOT = Path(__file__).parents[2]
FORTY = json.loads((ROOT / "benchmarks/prediction/forty_runs.json").read_text(encoding="utf-8"))
PAYS = json.loads((ROOT / "benchmarks/pays/results.json").read_text(encoding="utf-8"))


def words_of(path: str) -> str:
    """The text of a page, in one line."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("README.md", "off by {middle} % in the median and {worst} % at worst"),
        ("docs/benchmarks/predictions.md", "are missed: {middle}, {worst} and {bias} %"),
        ("docs/benchmarks/predictions.md", "| 40 | {middle} % | {worst} % |"),
    ],
)
def test_errors_of_the_forty_runs(page: str, text: str) -> None:
    errors = [100 * row["error"] for row in FORTY["rows"]]
    sizes = [abs(error) for error in errors]
    figures = {"middle": median(sizes), "worst": max(sizes), "bias": mean(errors)}
    assert text.format(**{k: f"{v:.1f}" for k, v in figures.items()}) in words_of(page)


def test_speeds_where_a_plan_pays() -> None:
    def ratio(case: str, over: str) -> str:
        return f"{PAYS[case][over]['median']:.2f}"

    slow, head = "two-hosts", "gpt-head"
    readme = words_of("README.md")
    assert f"trains {ratio(slow, 'over_copies')} times as fast as with DDP" in readme
    assert f"{ratio(slow, 'over_equal')} times as fast as with torch's 1F1B" in readme
    assert f"and {ratio(slow, 'over_torch')} times (" in readme
    assert f"{ratio(head, 'over_equal')} and {ratio(head, 'over_torch')} times, and " in readme
    assert f"and {ratio(head, 'over_copies')} times as fast as DDP" in readme
