import io
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.report.tables import (
    ComparisonRow,
    comparison_table,
    plan_table,
    profile_table,
    refusal_lines,
)


def text_of(table: Table) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_plan_table_shows_layers_devices_rows_and_memory(
    small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    text = text_of(plan_table(small_plan, small_profile, small_cluster, [1e6, 2e6, 3e6, 4e6]))
    middle = next(line for line in text.splitlines() if "blocks.2 ... blocks.5" in line)
    assert "[3, 7)" in middle and "1, 2" in middle and "1, 1" in middle and "yes" in middle
    assert "3.00 MB" in middle and "60.0 MB" in middle


def test_the_profile_table_has_a_line_for_each_layer(small_profile: ModelProfile) -> None:
    lines = text_of(profile_table(small_profile)).splitlines()
    assert len(lines) == 1 + len(small_profile.layers)


def test_a_comparison_shows_every_figure_and_reasons_apart() -> None:
    rows = [
        ComparisonRow(
            planner="search",
            schedule="1f1b",
            stages="4x1",
            micro_batches="8 of 4",
            iteration_s=0.1,
            gap=0.05,
            bubble=0.25,
            peak_memory_bytes=3e9,
            speedup_over_one_device=3.5,
            planning_s=0.25,
        ),
        ComparisonRow("a", "b", refusal="too [big]", planning_s=0.001),
    ]
    text = text_of(comparison_table(rows))
    search, other = text.splitlines()[2:4]
    for figure in ("8 of 4", "100 ms", "5.0 %", "25.0 %", "3.00 GB", "3.50", "250 ms", " - "):
        assert figure in search
    assert "no plan" in other and "too" not in text
    assert refusal_lines(rows) == ["a, b: too [big]"]
    assert "SPP's" not in text
    assert "SPP's" in text_of(comparison_table([replace(rows[0], spp_bound_s=0.3)]))
