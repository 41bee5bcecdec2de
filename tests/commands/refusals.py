"""Commands that refuse what they are given."""

from collections.abc import Callable
from typing import Any

Penstock = Callable[..., Any]
"""The fixture that runs a command; its answer has a code, an output, errors and values."""


def refused(answer: Any, code: int, *told: str) -> None:
    """The command ended with one line that tells all of this, and nothing on standard output.

    Before it there may be lines of progress where planning had begun.
    """
    assert (answer.code, answer.output) == (code, ""), answer.errors
    *progress, last = answer.errors.splitlines()
    assert last.startswith("penstock: error: ")
    assert code == 3 or not progress
    assert [words for words in told if words not in last] == [], last
