"""Do pipelines that never flush learn as well? Every method, at the learning rate that suits it.

    python benchmarks/convergence.py [--workers 2] [--seeds 5] [--only digits-dense/sgd/4]
    python benchmarks/convergence.py --quick

A case is a task, an optimizer and a number of stages. Every method gets the same tuning effort:
each learning rate of the grid with one seed, then its best, and that of synchronous training, with
all seeds. Finished runs are kept in ``--runs`` (a line of JSON each) and not run again, so an
interrupted benchmark continues where it stopped; the summary is written to ``--out``.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from time import strftime
from typing import Any

HERE = Path(__file__).parent / "convergence"
sys.path.insert(0, str(HERE))

from runs import Asked, train  # noqa: E402
from summary import (  # noqa: E402
    CASES,
    RATES,
    Case,
    best_rate,
    methods_of,
    summarise,
    table_of,
)
from tasks import TASKS  # noqa: E402

QUICK_UPDATES = 80


def main() -> None:
    """Run what is missing, then write and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="cases, as task/optimizer/stages")
    parser.add_argument("--quick", action="store_true", help="one short case, nothing is written")
    parser.add_argument("--runs", type=Path, default=Path("convergence-runs.jsonl"))
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or str(case) in arguments.only]
    if arguments.quick:
        cases, arguments.seeds = CASES[:1], 2
    if not cases:
        parser.error(f"--only: choose of {', '.join(map(str, CASES))}")
    kept = Kept(None if arguments.quick else arguments.runs)
    found: list[dict[str, Any]] = []
    for case in cases:
        updates = QUICK_UPDATES if arguments.quick else TASKS[case.task].updates
        first = Asked(case.task, case.optimizer, "synchronous", case.stages, 0.0, 0, updates)
        run_case(first, case, arguments.seeds, arguments.workers, kept)
        found.append(summarise(case, kept.of(case)))
    print("\n\n".join(map(table_of, found)))
    if not arguments.quick:
        arguments.out.write_text(json.dumps(document(found), indent=1) + "\n")


class Kept:
    """Finished runs, in memory and in a file of lines."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.runs: dict[Asked, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                run = json.loads(line)
                self.runs[Asked(**run["asked"])] = run

    def add(self, asked: Asked, run: dict[str, Any]) -> None:
        """Keep a finished run."""
        self.runs[asked] = run
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(run) + "\n")

    def of(self, case: Case) -> list[dict[str, Any]]:
        """The runs of a case."""
        return [run for asked, run in self.runs.items() if case.holds(asked)]


def run_case(first: Asked, case: Case, seeds: int, workers: int, kept: Kept) -> None:
    """Tune every method with one seed, then run what is compared with all seeds."""
    methods = methods_of(case)
    rates = RATES[case.task.partition("-")[0], case.optimizer]
    grid = [replace(first, method=m, learning_rate=r) for m in methods for r in rates]
    run_all(grid, workers, kept)
    common = best_rate("synchronous", kept.of(case))
    chosen = {(m, r) for m in methods for r in (best_rate(m, kept.of(case)), common)}
    wanted = [
        replace(first, method=m, learning_rate=r, seed=seed)
        for m, r in sorted(chosen)
        for seed in range(seeds)
    ]
    run_all(wanted, workers, kept)


def run_all(wanted: Iterable[Asked], workers: int, kept: Kept) -> None:
    """Run what has not been run before, side by side."""
    missing = [asked for asked in wanted if asked not in kept.runs]
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(train, asked): asked for asked in missing}
        for done in as_completed(running):
            asked = running[done]
            run = done.result()
            kept.add(asked, run.document())
            print(f"{asked}: loss {run.loss:.4f}", file=sys.stderr, flush=True)


def document(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summaries, with where they were made."""
    return {
        "date": strftime("%Y-%m-%d %H:%M"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "cases": list(found),
    }


if __name__ == "__main__":
    main()
