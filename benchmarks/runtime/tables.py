"""The tables of the page on the runtime, from the benchmark's results."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Rows: TypeAlias = list[dict[str, Any]]

WITHOUT = "-"


def page_tables(document: dict[str, Any]) -> dict[str, list[str]]:
    """The lines of each part's table; parts that were not measured are left out."""
    return {part: list(lines(document[part])) for part, lines in TABLES.items() if part in document}


def overhead(rows: Rows) -> Iterator[str]:
    """Iterations, ideals and overheads of both runtimes."""
    yield (
        "| schedule | ranks | ours | torch | ideal, ours | ideal, torch | us an action, ours "
        "| torch | ratio |"
    )
    yield "|---" * 9 + "|"
    for row in rows:
        ideals = (row["ideal_s"], row["rival_ideal_s"])
        seconds = map(milliseconds, (row["ours_s"], row["rival_s"], *ideals))
        both = (number(row[key], 1e6, 0) for key in ("overhead_s", "rival_overhead_s"))
        cells = (*seconds, *both, number(row["overhead_ratio"], 1, 2))
        yield f"| `{row['case']}` | {row['ranks']} | {' | '.join(cells)} |"


def efficiency(rows: Rows) -> Iterator[str]:
    """The ideal over the iteration, of both runtimes."""
    yield (
        "| schedule | ours | torch | efficiency, ours | torch | between actions "
        "| iterations, ours / torch |"
    )
    yield "|---" * 7 + "|"
    for row in rows:
        seconds = map(milliseconds, (row["ours_s"], row["rival_s"]))
        ratios = ("efficiency", "rival_efficiency", "between_efficiency", "iteration_ratio")
        cells = (*seconds, *(number(row[key], 1, 3) for key in ratios))
        yield f"| `{row['case']}` | {' | '.join(cells)} |"


def memory(rows: Rows) -> Iterator[str]:
    """The peak of each rank, and how far that is above the start."""
    yield ("| schedule | M | peak, ours | peak, torch | growth over the start, ours | torch |")
    yield "|---" * 6 + "|"
    for ours, torch in zip(rows[::2], rows[1::2], strict=True):
        peaks = (of_ranks(row["peak_mib"]) for row in (ours, torch))
        grown = (
            of_ranks(
                [most - at for most, at in zip(row["peak_mib"], row["before_mib"], strict=True)]
            )
            for row in (ours, torch)
        )
        cells = " | ".join((*peaks, *grown))
        yield f"| `{ours['case']}` | {ours['micro_batches']} | {cells} |"


TABLES: dict[str, Callable[[Rows], Iterator[str]]] = {
    "overhead": overhead,
    "gloo": overhead,
    "efficiency": efficiency,
    "memory": memory,
}


def milliseconds(seconds: float | None) -> str:
    """Seconds in milliseconds; a dash where there are none."""
    return WITHOUT if seconds is None else f"{1e3 * seconds:.1f} ms"


def number(value: float | None, scale: float, digits: int) -> str:
    """A figure; a dash where there is none."""
    return WITHOUT if value is None else f"{scale * value:.{digits}f}"


def of_ranks(values: list[float]) -> str:
    """A figure of each rank."""
    return " / ".join(f"{value:.0f}" for value in values)
