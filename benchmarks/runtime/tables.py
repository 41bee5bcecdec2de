"""The tables of the page on the runtime, from the benchmark's results."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

__all__ = ["page_tables"]

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
    """Our plan of each round beside the rival's schedules."""
    yield (
        "| round | our schedule | predicted | ours | torch 1F1B | interleaved | DualPipeV "
        "| times as fast as the best |"
    )
    yield "|---" * 8 + "|"
    for index, row in enumerate(rows[1:], start=1):
        taken = (row["seconds"][name] for name in ("ours", "1f1b", "interleaved", "dualpipe-v"))
        seconds = " | ".join(f"{value:.2f} s" for value in (row["predicted_s"], *taken))
        schedule = row["plan"]["schedule"]
        yield f"| {index} | `{schedule}` | {seconds} | {row['faster']:.3f} |"


def equal(rows: Rows) -> Iterator[str]:
    """Our plan within the memory of the rival's, and ours beside DistributedDataParallel."""
    yield (
        "| round | ours, in torch's memory | torch 1F1B | interleaved | DualPipeV "
        "| times as fast as the best | ours, all memory | DDP | times as fast as DDP |"
    )
    yield "|---" * 9 + "|"
    for index, row in enumerate(rows[1:], start=1):
        seconds = {name: f"{value:.2f} s" for name, value in row["seconds"].items()}
        pipelines = " | ".join(
            seconds[name] for name in ("once", "1f1b", "interleaved", "dualpipe-v")
        )
        copies = f"{seconds['free']} | {seconds['ddp']} | {row['over_ddp']:.3f}"
        yield f"| {index} | {pipelines} | {row['equal_memory']:.3f} | {copies} |"


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


def without_flush(rows: Rows) -> Iterator[str]:
    """Asynchronous schedules against 1F1B, measured and as simulated."""
    yield (
        "| micro-batches a batch | schedule | measured | simulated "
        "| times as fast as 1F1B, measured | simulated |"
    )
    yield "|---" * 6 + "|"
    for count in rows:
        for row in count["rows"]:
            seconds = f"{row['measured_s']:.2f} s | {row['predicted_s']:.2f} s"
            times = f"{row['times_as_fast']:.2f} | {row['predicted_times_as_fast']:.2f}"
            yield f"| {count['micro_batches']} | `{row['schedule']}` | {seconds} | {times} |"


TABLES: dict[str, Callable[[Rows], Iterator[str]]] = {
    "overhead": overhead,
    "gloo": overhead,
    "efficiency": efficiency,
    "end-to-end": end_to_end,
    "equal": equal,
    "memory": memory,
    "without-flush": without_flush,
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
