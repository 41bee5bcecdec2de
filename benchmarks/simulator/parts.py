"""The parts of the benchmark, each with its results and a table of them."""

from collections.abc import Callable, Iterator
from typing import Any

from generation import MICRO_BATCHES, Generated, generate_all
from large_run import LargeRun, run_apart
from playing import PLAYED, SCORED, Played, Scored, play_case, score_case

__all__ = ["PARTS", "page_tables", "summary_words"]


def playing() -> tuple[list[Played], list[str]]:
    """Actions a second."""
    found = [play_case(case) for case in PLAYED]
    head = f"{'million actions a second':<48}{'actions':>9}{'engine':>9}{'plain':>9}"
    rows = [
        f"{r.name:<48}{r.compute_actions:>9}{r.engine_actions_per_s / 1e6:>9.2f}"
        f"{r.plain_actions_per_s / 1e6:>9.3f}"
        for r in found
    ]
    return found, [head, *rows]


def scoring() -> tuple[list[Scored], list[str]]:
    """Milliseconds of a score."""
    score_case(SCORED[0])
    found = [score_case(case) for case in SCORED]
    heads = ("engine", "again", "moved", "fresh")
    head = f"{'milliseconds of a score':<48}" + "".join(f"{name:>9}" for name in heads)
    rows = [
        f"{r.name:<48}{r.engine_ms:>9.2f}{r.again_ms:>9.2f}{r.moved_ms:>9.2f}{r.fresh_ms:>9.2f}"
        for r in found
    ]
    return found, [head, *rows]


def large() -> tuple[list[LargeRun], list[str]]:
    """One large cluster."""
    r = run_apart()
    rows = [
        f"{r.name}: {r.compute_actions} actions, order {r.order_s:.2f} s, parts "
        f"{r.parts_s:.2f} s, engine {r.engine_s:.2f} s ({r.actions_per_s / 1e6:.2f} million "
        f"actions a second), at most {r.peak_bytes / 2**20:.0f} MiB "
        f"({r.peak_bytes_before / 2**20:.0f} before)"
    ]
    return [r], rows


def generation() -> tuple[list[Generated], list[str]]:
    """Nanoseconds an action."""
    found = generate_all()
    head = f"{'nanoseconds an action, by micro-batches':<48}"
    head += "".join(f"{count:>9}" for count in MICRO_BATCHES)
    rows = [
        f"{r.schedule:<48}"
        + "".join(f"{'-' if ns is None else f'{ns:.0f}':>9}" for ns in r.nanoseconds_an_action)
        for r in found
    ]
    return found, [head, *rows]


PARTS: dict[str, Callable[[], tuple[list, list[str]]]] = {
    "playing": playing,
    "scoring": scoring,
    "large": large,
    "generation": generation,
}


def page_tables(document: dict[str, Any]) -> dict[str, list[str]]:
    """The tables of the README, from the results."""
    return {
        "playing": [
            "| pipeline | actions | engine, million actions/s | plain, million actions/s |",
            "|---|---|---|---|",
            *(
                f"| {row['name']} | {row['compute_actions']} "
                f"| {row['engine_actions_per_s'] / 1e6:.1f} "
                f"| {row['plain_actions_per_s'] / 1e6:.2f} |"
                for row in document["playing"]
            ),
        ],
        "scoring": [
            "| pipeline | engine | again | moved | fresh |",
            "|---|---|---|---|---|",
            *(f"| {row['name']} | {' | '.join(scores(row))} |" for row in document["scoring"]),
        ],
        "generation": [
            f"| schedule | {' | '.join(f'{count:,}' for count in MICRO_BATCHES)} |",
            "|---" * (1 + len(MICRO_BATCHES)) + "|",
            *(
                f"| `{row['schedule']}` | {' | '.join(orders(row))} |"
                for row in document["generation"]
            ),
        ],
    }


def scores(row: dict[str, Any]) -> Iterator[str]:
    """Milliseconds with about three digits."""
    for key in ("engine_ms", "again_ms", "moved_ms", "fresh_ms"):
        yield f"{row[key]:.0f}" if row[key] >= 10 else f"{row[key]:.2f}"


def orders(row: dict[str, Any]) -> Iterator[str]:
    """Nanoseconds, a dash where a size was left out."""
    for value in row["nanoseconds_an_action"]:
        yield "-" if value is None else f"{value:.0f}"


def summary_words(document: dict[str, Any]) -> list[str]:
    """What all pages say of the speed."""
    speeds = [row["engine_actions_per_s"] / 1e6 for row in document["playing"]]
    (large,) = document["large"]
    parts = (f"{large[key]:.2f} s" for key in ("order_s", "parts_s", "engine_s"))
    plain = [
        row["engine_actions_per_s"] / row["plain_actions_per_s"] for row in document["playing"]
    ]
    slow = ("v-half", "v-min")
    writing = [
        nanoseconds
        for row in document["generation"]
        if row["schedule"] not in slow
        for nanoseconds in row["nanoseconds_an_action"][MICRO_BATCHES.index(4096) :]
        if nanoseconds is not None
    ]
    return [
        f"{min(plain):.0f} to {max(plain):.0f} times as fast as the plain engine",
        f"With 4,096 micro-batches and more, writing an order down takes {min(writing):.0f} to "
        f"{max(writing):.0f} ns an action",
        f"{min(speeds[:-1]):.1f} to {max(speeds[:-1]):.1f} million actions a second",
        f"{speeds[-1]:.1f} million where 16 devices share 4 cores",
        "order {}, parts {}, engine {}".format(*parts)
        + f" ({large['actions_per_s'] / 1e6:.1f} million actions a second)",
        f"at most {large['peak_bytes'] / 2**20:.0f} MiB",
    ]
