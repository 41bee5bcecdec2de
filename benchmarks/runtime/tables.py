"""The tables of the page on the runtime, from the benchmark's results."""

from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
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


def end_to_end(rows: Rows) -> Iterator[str]:
    """Each case: our plan within the memory of the rival's, and ours beside replicas."""
    yield (
        "| case | our schedules | ours | best of torch | times as fast | could be at most | won "
        "| predicted fastest | all memory: ours | best of DDP and FSDP2 | times as fast |"
    )
    yield "|---" * 11 + "|"
    for row in rows:
        rounds = row["rounds"]
        schedules = Counter(one["plans"]["once"]["schedule"] for one in rounds)
        named = ", ".join(f"`{name}` {count}" for name, count in schedules.most_common())
        rivals = Counter(one["best_rival"] for one in rounds).most_common(1)[0][0]
        replicas = Counter(one["best_replicas"] for one in rounds).most_common(1)[0][0]
        cells = (
            end_case(row),
            named,
            f"{median(one['seconds']['once'] for one in rounds):.3f} s",
            f"{median(one['seconds'][one['best_rival']] for one in rounds):.3f} s ({rivals})",
            spread(row["equal_memory"]),
            f"{row['can_be_won']['median']:.2f}",
            f"{100 * won(row):.0f} %",
            f"{row['fastest']['median']:.2f}",
            f"{median(one['seconds']['free'] for one in rounds):.3f} s",
            f"{median(one['seconds'][one['best_replicas']] for one in rounds):.3f} s ({replicas})",
            spread(row["all_memory"]),
        )
        yield f"| {' | '.join(cells)} |"


def end_case(row: dict[str, Any]) -> str:
    """A case of `end_to_end` in words."""
    link = f", {8e-6 * row['link_bytes_per_s']:.0f} Mb/s" if row["link_bytes_per_s"] else ""
    return f"`{row['model']}`, {row['ranks']} ranks{link}, {row['micro_batches']} micro-batches"


def won(row: dict[str, Any]) -> float:
    """Of the seconds that any order could save over the best rival, the share that ours saves."""
    return (1 - 1 / row["equal_memory"]["median"]) / (1 - 1 / row["can_be_won"]["median"])


def spread(found: dict[str, float]) -> str:
    """The median and the range of rounds."""
    return f"{found['median']:.2f} ({found['least']:.2f} to {found['most']:.2f})"


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
    "end-to-end": end_to_end,
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
