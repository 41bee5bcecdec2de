"""The gallery shows every schedule, as it is drawn and timed today."""

from pathlib import Path

import pytest
from scripts import script_at

from penstock.schedule.registry import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text()


SCRIPT = script_at("docs/pictures/schedules.py", "schedules")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_has_its_section_and_its_picture(name: str) -> None:
    section = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert f"![{name}](pictures/schedules/{name}.svg)" in section
    assert (DOCS / "pictures" / "schedules" / f"{name}.svg").is_file()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_holds(name: str) -> None:
    assert f"\n{SCRIPT.table_row(name)}\n" in PAGE
