"""The page on capture runs as it is printed."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works" / "capture.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_an_example_of_the_page_runs(number):
    exec(compile(BLOCKS[number], f"{PAGE}:{number}", "exec"), {"__name__": "page"})
