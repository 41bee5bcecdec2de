"""Compare `search` with itself where it may choose less.

    python benchmarks/planning/consistency.py [--seed 56] [--count 60] [--write]

Each random problem is planned with all schedules, then under five single ones, and with 90 % of the
memory. A search with more choice has a budget of the same size, so it may be behind. The table says
how often, and by how much. `--write` puts it beside this file.
"""

import argparse
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.errors import Infeasible
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import find_plan
from penstock.simulate.score import make_score

sys.path.insert(0, str(Path(__file__).parent))

from random_problems import random_problem

SCHEDULES, LESS_MEMORY = 5, 0.9
"""Single schedules for each problem; the share of the memory in the last case."""

LIMITS = (0.005, 0.02)
"""Shares by which a search with all choices is rarely, and never, behind."""


class Row(NamedTuple):
    """A problem with the seconds of all choices, and those of the best restricted search."""

    number: int
    seconds: float
    least_s: float
    name: str

    @property
    def behind(self) -> float:
        """The share by which the search is behind the restricted one."""
        return self.seconds / self.least_s - 1 if self.least_s < inf else 0.0


def seconds_of(problem: PlanningProblem, effort: float) -> float:
    """Return the seconds of the plan of `search`; infinite where nothing fits."""
    score = make_score(problem)
    try:
        return score(find_plan(problem, "search", score, effort=effort))
    except Infeasible:
        return inf


def with_less_memory(problem: PlanningProblem, share: float) -> PlanningProblem:
    """Return the problem with a share of the memory of each device."""
    hosts = tuple(
        replace(
            host,
            devices=tuple(
                replace(device, memory_bytes=share * device.memory_bytes) for device in host.devices
            ),
        )
        for host in problem.cluster.hosts
    )
    return replace(problem, cluster=Cluster(problem.cluster.name, hosts, problem.cluster.links))


def row_of(
    problem: PlanningProblem, number: int, schedules: int = SCHEDULES, effort: float = 1.0
) -> Row:
    """Ask one problem with all choices and with fewer."""
    draw = Random(f"consistency/{number}")
    names = draw.sample(problem.schedules, min(schedules, len(problem.schedules)))
    found = {name: seconds_of(replace(problem, schedules=(name,)), effort) for name in names}
    found[f"{LESS_MEMORY:.0%} of the memory"] = seconds_of(
        with_less_memory(problem, LESS_MEMORY), effort
    )
    name = min(found, key=lambda one: found[one])
    return Row(number, seconds_of(problem, effort), found[name], name)


def table_of(rows: list[Row]) -> str:
    """Return what the rows say together, and each problem that is behind by the first limit."""
    behind = sorted((row for row in rows if row.behind > LIMITS[0]), key=lambda row: -row.behind)
    lines = [
        f"| problems | behind a restricted search by over {LIMITS[0]:.1%} "
        f"| by over {LIMITS[1]:.0%} | at most |",
        "|---|---|---|---|",
        f"| {len(rows)} | {len(behind)} | {sum(row.behind > LIMITS[1] for row in rows)} "
        f"| {max(row.behind for row in rows):.2%} |",
        "",
    ]
    lines += [f"- problem {row.number}: {row.behind:.2%} behind {row.name}" for row in behind]
    return "\n".join(lines)


def main() -> int:
    """Ask all problems; 1 where too many are behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=56)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="write consistency.md")
    asked = parser.parse_args()
    rows = [row_of(random_problem(asked.seed, k), k) for k in range(asked.count)]
    table = table_of(rows)
    print(table)
    if asked.write:
        Path(__file__).with_suffix(".md").write_text(f"Seed {asked.seed}.\n\n{table}\n")
    return int(any(row.behind > LIMITS[1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
