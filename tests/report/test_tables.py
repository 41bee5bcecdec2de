import io

from rich.console import Console
from rich.table import Table

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.report.tables import plan_table, profile_table


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
