"""A step of a plain pipeline enters few modules of the runtime, and the page names every one."""

import re
from pathlib import Path

from runtime.walk_cases import entered_by_the_second_step

from penstock.runtime.processes.launch import launch_workers

PAGE = Path(__file__).parents[2] / "docs/how-it-works/runtime.md"
MOST = 16


def test_a_step_enters_the_modules_that_the_page_names_and_no_others() -> None:
    entered = set[str]().union(*launch_workers(entered_by_the_second_step, workers=2))
    walk = PAGE.read_text(encoding="utf-8").partition("## The walk of a micro-batch")[2]
    named = re.findall(r"`runtime/([a-z_/]+\.py)`", walk.partition("\n## ")[0])
    assert set(named) == entered
    assert len(named) == len(entered) <= MOST
