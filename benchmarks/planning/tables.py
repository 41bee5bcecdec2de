"""The tables of the page on planning, from the rows of the benchmark."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypeAlias

from rows import CLUSTERS, EXPLAINED_GAP

Row: TypeAlias = dict[str, Any]

KINDS = {"DDP": "plain", "DDP with activation checkpointing": "by block"}
"""Shorter names for two of the kinds of data parallelism."""

CHOICE = 0.002
"""Of plans so near the fastest one `search` answers with that which people would choose."""


def search_of(row: Row) -> Row:
    """The default planner's answer of a row."""
    return next((a for a in row["answers"] if a["planner"] == "search"), {})


def done_of(rows: Sequence[Row]) -> list[Row]:
    """The rows that were planned to the end."""
    return [row for row in rows if "failed" not in row]


def behind(row: Row) -> str:
    """The plan that is faster than that of `search` by more than `CHOICE`; empty if none is."""
    mine = search_of(row).get("iteration_s")
    others = [*row["answers"], row["whole_backwards"], row["equal_memory"].get("answer", {})]
    others.append(row.get("every_schedule", {}).get("best", {}))
    for other in others:
        seconds = other.get("iteration_s")
        if seconds and (mine is None or seconds < mine * (1 - CHOICE)):
            return f"{other['planner']} under {other['schedule']}"
    return ""


def figures(rows: Sequence[Row], figure: Callable[[Row], float | None]) -> list[float]:
    """A figure of every row that has it, the least first."""
    return sorted(value for row in done_of(rows) if (value := figure(row)) is not None)


def gap_of(row: Row) -> float | None:
    """By how much `search` is above the bound for every order."""
    return search_of(row).get("gap")


def faster_of(row: Row) -> float | None:
    """The best plan with whole backwards over that of `search`."""
    return row["faster_than_whole_backwards"]


def faster_in_same_memory_of(row: Row) -> float | None:
    """The same, where `search` has no more memory than that plan."""
    return row["equal_memory"].get("faster")


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    """A summary of all rows."""
    summary: dict[str, object] = {
        "rows": len(rows),
        "failed": [f"{r['model']}:{r['cluster']}" for r in rows if "failed" in r],
        "search_behind": {
            f"{r['model']}:{r['cluster']}": words for r in done_of(rows) if (words := behind(r))
        },
        "rows_asked_under_every_schedule": sum("every_schedule" in r for r in rows),
    }
    for name, figure in (
        ("gap", gap_of),
        ("faster_than_whole_backwards", faster_of),
        ("faster_in_same_memory", faster_in_same_memory_of),
        ("over_replicas", over_replicas),
        ("over_published", over_published),
        ("over_published_under_every_schedule", over_every_schedule),
        ("planning_cpu_s", lambda row: search_of(row).get("planning_cpu_s")),
    ):
        if found := figures(rows, figure):
            summary[name] = {"least": found[0], "median": median(found), "most": found[-1]}
    gaps = figures(rows, gap_of)
    summary["rows_above_5_percent"] = sum(gap > EXPLAINED_GAP for gap in gaps)
    summary["rows_above_15_percent"] = sum(gap > 0.15 for gap in gaps)
    return summary


def by_cluster(rows: Sequence[Row], cell: Callable[[Row], str]) -> Iterator[str]:
    """A table with a line for each model and a column for each cluster."""
    found = {(row["model"], row["cluster"]): row for row in done_of(rows)}
    yield f"| model | {' | '.join(CLUSTERS)} |"
    yield "|---" * (1 + len(CLUSTERS)) + "|"
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = (cell(found[model, c]) if (model, c) in found else "-" for c in CLUSTERS)
        yield f"| {model} | {' | '.join(cells)} |"


def percent(value: float | None) -> str:
    """A gap in percent."""
    return "-" if value is None else f"{100 * value:.1f}"


def times(value: float | None) -> str:
    """A ratio of times."""
    return "-" if value is None else f"{value:.2f}"


def milliseconds(row: Row) -> str:
    """Seconds of `search`'s plan with its schedule."""
    found = search_of(row)
    if found.get("iteration_s") is None:
        return "-"
    milliseconds_text = f"{1e3 * found['iteration_s']:,.{0 if found['iteration_s'] >= 1 else 1}f}"
    return f"{milliseconds_text}, {found['schedule']}"


def over_published(row: Row) -> float | None:
    """The best of the published planners over `search`."""
    mine = search_of(row).get("iteration_s")
    others = [a["iteration_s"] for a in row["answers"] if a["planner"] != "search"]
    return min(filter(None, others)) / mine if mine and any(others) else None


def over_every_schedule(row: Row) -> float | None:
    """The same where they may use every schedule that `search` may use."""
    mine = search_of(row).get("iteration_s")
    best = row.get("every_schedule", {}).get("best", {}).get("iteration_s")
    return min(filter(None, (over_published(row), best / mine))) if mine and best else None


def over_replicas(row: Row) -> float | None:
    """The fastest kind of data parallelism that fits, over `search`."""
    mine = search_of(row).get("iteration_s")
    others = [r["iteration_s"] for r in row.get("rivals", ()) if r["iteration_s"]]
    return min(others) / mine if mine and others else None


def replicas_of(row: Row) -> str:
    """That ratio, and which kind it is."""
    over = over_replicas(row)
    if over is None:
        return "none fits"
    others = [r for r in row["rivals"] if r["iteration_s"]]
    name = min(others, key=lambda r: r["iteration_s"])["name"]
    return f"{times(over)}, {KINDS.get(name, name)}"


def both_over(row: Row) -> str:
    """With the schedules of their papers, and with every schedule."""
    return f"{times(over_published(row))}, {times(over_every_schedule(row))}"


def planner_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Each planner over `search`: median, worst, rows with a plan, CPU seconds."""
    yield "| planner | median | worst | rows with a plan | CPU seconds, median and most |"
    yield "|---|---|---|---|---|"
    done = done_of(rows)
    for name in dict.fromkeys(a["planner"] for row in done for a in row["answers"]):
        answers = [next(a for a in row["answers"] if a["planner"] == name) for row in done]
        over = [
            answer["iteration_s"] / search_of(row)["iteration_s"]
            for row, answer in zip(done, answers, strict=True)
            if answer["iteration_s"] and search_of(row)["iteration_s"]
        ]
        spent = [answer["planning_cpu_s"] for answer in answers]
        if over:
            yield (
                f"| `{name}` | {median(over):.2f} | {max(over):.2f} | {len(over)} of {len(done)} | "
                f"{median(spent):.2f}, {max(spent):.1f} |"
            )


def page_tables(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The tables of `docs/benchmarks/planning.md` by what they show."""
    return {
        "Milliseconds of `search`'s plan, and its schedule": list(by_cluster(rows, milliseconds)),
        "The best plan with whole backwards over that of `search`": list(
            by_cluster(rows, lambda row: times(faster_of(row)))
        ),
        "The same within the memory of that plan": list(
            by_cluster(rows, lambda row: times(faster_in_same_memory_of(row)))
        ),
        "The best of the published planners over `search`: own schedules, all": (
            list(by_cluster(rows, both_over))
        ),
        "The fastest data parallelism over `search`": list(by_cluster(rows, replicas_of)),
        "Each planner over `search`": list(planner_lines(rows)),
        "Gap above the bound for every order, in percent": list(
            by_cluster(rows, lambda row: percent(gap_of(row)))
        ),
        "CPU seconds of `search`": list(
            by_cluster(rows, lambda row: f"{search_of(row).get('planning_cpu_s', 0):.1f}")
        ),
    }


def markdown(rows: Sequence[Row], summary: dict[str, object]) -> str:
    """The page's tables, then what bound and plan rest on where they are far apart."""
    lines: list[str] = []
    for title, table in page_tables(rows).items():
        lines += [f"{title}:", "", *table, ""]
    lines += [f"Rows more than {100 * EXPLAINED_GAP:.0f} % above the bound:", ""]
    for row in done_of(rows):
        if row["explanation"]:
            words, place = " ".join(row["explanation"]), f"{row['model']} on {row['cluster']}"
            lines.append(f"- {place}. The bound: {row['bound_argument']}. The plan: {words}")
    for row in rows:
        if "failed" in row:
            lines.append(f"- {row['model']} on {row['cluster']} failed: {row['failed']}")
    lines += ["", *(f"- {key}: {value}" for key, value in summary.items())]
    return "\n".join(lines) + "\n"
