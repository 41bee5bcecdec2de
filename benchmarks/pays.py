"""Cases in which a plan pays: unequal models and machines, beside what users would run instead.

    python benchmarks/pays.py --only CASE --write    # five rounds of a case, about eight minutes
    python benchmarks/pays.py                        # the table of what was recorded
    python benchmarks/pays.py --check                # exit 1 if it does not hold today

Each case is recorded by itself. A row counts while the code that it measured has not changed since.
Cases with a slow worker or a slow link need root. docs/benchmarks/runtime.md says what is measured.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks" / "pays"
RESULTS, CAUSES = HERE / "results.json", HERE / "causes.toml"
PAGE = ROOT / "docs" / "benchmarks" / "runtime.md"
sys.path[:0] = [str(ROOT / "benchmarks" / of) for of in ("pays", "prediction", "runtime", ".")]

ROUNDS, ITERATIONS = 5, 3
"""From the least to the most of five rounds holds the median with 94 %."""

LIMIT_S = 1800.0
HEADING = "Where a plan pays: results"

MEASURED = ("runtime", "core", "planners", "schedule", "simulate", "costs", "measure")
"""The packages of `penstock` on which a row depends."""

NOT_BEHIND, OVER_EQUAL, OVER_TORCH = 0.98, 1.25, 1.10
"""Goals: the most of a row's range; and the medians of rows over equal cuts and over the best."""

RIVALS = {
    "over_equal": "equal cuts",
    "over_torch": "the best of torch",
    "over_copies": "DDP or FSDP",
}


def main() -> None:
    """Measure a case, print the table, or hold it against the goals."""
    from unequal_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, help="measure this case")
    parser.add_argument("--write", action="store_true", help="record it, and put it on the page")
    parser.add_argument("--check", action="store_true", help="exit 1 if a row or goal is missed")
    parser.add_argument("--smallest", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if arguments.only:
        rounds = (1, 1) if arguments.smallest else (ROUNDS, ITERATIONS)
        rows[arguments.only] = measured(arguments.only, *rounds)
    rows = {name: rows[name] for name in CASES if name in rows}
    print("\n".join(table(rows)))
    if arguments.write:
        from largest import with_table

        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(page, HEADING, "\n".join(table(rows))), encoding="utf-8")
    if arguments.check:
        missed = list(faults(rows))
        print("\n".join(missed), file=sys.stderr)
        sys.exit(bool(missed))


def measured(name: str, rounds: int, iterations: int) -> dict[str, Any]:
    """A case's rounds, all with the plans of one profile, and the spread of their ratios."""
    from other_load import other_load
    from runtime import machine
    from starting import run_tasks
    from unequal_cases import CASES

    case = CASES[name]
    task = ("case", {"name": name, "rounds": rounds, "iterations": iterations})
    with other_load() as load:
        (found,) = run_tasks([task], case.ranks, LIMIT_S, case.link_bytes_per_s, case.slow_rank)
    ratios = (*RIVALS, "at_most")
    spreads = {key: spread([one[key] for one in found["rounds"]]) for key in ratios}
    return {**spreads, "machine": {**machine(), "other_load": load.cores}, **found}


def spread(values: list[float]) -> dict[str, float]:
    """The least, the median and the most."""
    return {"least": min(values), "median": median(values), "most": max(values)}


def table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line of Markdown for each case."""
    from unequal_cases import CASES

    yield (
        "| case | ranks | our schedule | ours | over equal cuts | over the best of torch "
        "| could be at most | with all memory | over DDP or FSDP2 | planning | recorded |"
    )
    yield "|---" * 11 + "|"
    for name, row in rows.items():
        rounds = row["rounds"]
        cells = (
            CASES[name].title,
            str(CASES[name].ranks),
            f"`{row['plans']['ours']['schedule']}`",
            f"{median(one['seconds']['ours'] for one in rounds):.3f} s",
            shown(row["over_equal"]),
            f"{shown(row['over_torch'])} {counted(one['best_torch'] for one in rounds)}",
            f"{row['at_most']['median']:.2f}",
            f"{median(one['seconds']['free'] for one in rounds):.3f} s",
            f"{shown(row['over_copies'])} {counted(one['best_copies'] for one in rounds)}",
            f"{row['plans']['ours']['planning_s']:.1f} s",
            row["machine"]["date"].partition(" ")[0],
        )
        yield f"| {' | '.join(cells)} |"


def counted(names: Iterator[str]) -> str:
    """The fastest rival, and of how many rounds where it is not that of all."""
    found = Counter(names).most_common()
    return found[0][0] if len(found) == 1 else ", ".join(f"{name} {n}" for name, n in found)


def shown(found: dict[str, float]) -> str:
    """A median and its range."""
    return f"{found['median']:.2f} ({found['least']:.2f} to {found['most']:.2f})"


def faults(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Reasons to fail: rows that are missing or old, and goals missed without a known cause."""
    from unequal_cases import CASES

    causes = tomllib.loads(CAUSES.read_text(encoding="utf-8")) if CAUSES.exists() else {}
    for name in CASES:
        if name not in rows:
            yield f"{name}: not recorded; run --only {name} --write"
        elif changed_since(rows[name]["machine"]["commit"]):
            yield f"{name}: older than the code; run --only {name} --write"
    for name, row in rows.items():
        for key, rival in RIVALS.items():
            if row[key]["most"] < NOT_BEHIND and name not in causes:
                yield f"{name}: {shown(row[key])} of {rival}, no cause in {CAUSES.name}"
    for key, goal in (("over_equal", OVER_EQUAL), ("over_torch", OVER_TORCH)):
        found = median(row[key]["median"] for row in rows.values()) if rows else 0.0
        if found < goal and key not in causes:
            yield f"{RIVALS[key]}: median {found:.2f}, goal {goal}, no cause in {CAUSES.name}"


def changed_since(commit: str) -> bool:
    """Return whether code that a row depends on has changed since its commit."""
    packages = [f"src/penstock/{package}" for package in MEASURED]
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *packages]
    return subprocess.run(command, check=False).returncode != 0


if __name__ == "__main__":
    main()
