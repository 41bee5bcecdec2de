"""A step of a plain pipeline enters few modules, and the page names every one of the runtime."""

import re
from pathlib import Path

from runtime.walk_cases import entered_by_a_later_step

from penstock.runtime.processes.launch import launch_workers

PAGE = Path(__file__).parents[2] / "docs/how-it-works/architecture.md"
MOST = 36


def test_a_step_enters_few_modules_and_the_page_names_those_of_the_runtime() -> None:
    entered = set[str]().union(*launch_workers(entered_by_a_later_step, workers=2))
    print(*sorted(entered), sep="\n")
    walk = PAGE.read_text(encoding="utf-8").partition("## The walk of a micro-batch")[2]
    named = re.findall(r"`runtime/([a-z_/]+\.py)`", walk.partition("\n## ")[0])
    of_runtime = [path for path in entered if path.startswith("runtime/")]
    assert sorted(f"runtime/{path}" for path in named) == sorted(of_runtime)
    assert len(entered) <= MOST
