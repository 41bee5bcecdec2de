"""Rows that a part of the proof found, of which some fail; one table of all."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias

import torch

Outcome: TypeAlias = Literal["right", "wrong", "failed", "told", "not judged"]
"""wrong: outside its bar; failed: an error; told: a figure without a bar."""


@dataclass(frozen=True)
class Row:
    """One statement of part ``part``, what was found, and the bar it is held to."""

    part: str
    what: str
    found: str
    outcome: Outcome
    bar: str = ""
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Setting:
    """The place of the parts: a GPU, or ``stand_in``; ``small``: a little of each.

    ``ends_s`` is when a part must have ended, of `time.perf_counter`.
    """

    stand_in: bool = False
    small: bool = False
    out: Path = Path("gpu-day")
    ends_s: float = float("inf")

    @cached_property
    def device(self) -> torch.device:
        """The GPU."""
        return torch.device("cuda", 0)

    @property
    def is_over(self) -> bool:
        """Return whether there is no time for more."""
        return perf_counter() > self.ends_s

    def by_device(self, row: Row) -> Row:
        """A row that only a device can judge."""
        if not self.stand_in or row.outcome == "failed":
            return row
        return Row(row.part, row.what, row.found, "not judged", row.bar, row.numbers)


def under(part: str, what: str, value: float, bar: float, unit: str = "", **numbers: Any) -> Row:
    """A value that must not be above a bar; one that is not a number is."""
    outcome: Outcome = "right" if value <= bar else "wrong"
    numbers = {"value": value, **numbers}
    return Row(part, what, f"{value:.3g} {unit}".strip(), outcome, f"<= {bar:g}", numbers)


def told(part: str, what: str, found: str, **numbers: Any) -> Row:
    """A figure without a bar."""
    return Row(part, what, found, "told", numbers=numbers)


def failing(rows: Sequence[Row]) -> list[Row]:
    """The rows that fail."""
    return [row for row in rows if row.outcome in ("wrong", "failed")]


def table(rows: Sequence[Row]) -> str:
    """The rows for people, and how many there are of each outcome."""
    lines = [
        f"{row.outcome:<10}  {row.part}  {row.what}: {row.found}"
        + (f" (bar {row.bar})" if row.bar else "")
        for row in rows
    ]
    outcomes = [row.outcome for row in rows]
    counts = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
    return "\n".join([*lines, f"{len(rows)} rows: {counts}"])


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows, one a line."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    """The rows that were written, as far as they were."""
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]
