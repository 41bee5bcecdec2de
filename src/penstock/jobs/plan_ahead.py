"""Plans in another process for one worker less, while the workers train.

When a worker is lost, the others need not wait for their plan.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from penstock.document import json_text, parse_json
from penstock.plan.json_file import plan_from_json, plan_to_json
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planning.answers import TimeLimit
from penstock.planning.tensor_groups import planned_in_groups
from penstock.simulate.score import make_score

__all__ = ["planned_ahead"]

LIMIT = TimeLimit(30.0, time.perf_counter)
"""For the search, which gets only what the workers leave of the cores."""

LOWEST_PRIORITY = 19


@contextmanager
def planned_ahead(
    problem: PlanningProblem, planner: str, sizes: Sequence[int] = ()
) -> Generator[Callable[[], Plan | None]]:
    """Within, another process makes a plan, which may have tensor groups of ``sizes``.

    The function gives it, or None until it is made.
    """
    command = [sys.executable, "-P", "-m", "penstock.jobs.plan_ahead"]
    with TemporaryFile() as given, TemporaryFile() as made:
        pickle.dump((problem, planner, tuple(sizes)), given)
        given.seek(0)
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=given, stdout=made, stderr=quiet)

        def plan() -> Plan | None:
            if process.poll() != 0:
                return None
            made.seek(0)
            name = Path("the plan made ahead")
            return plan_from_json(parse_json(made.read().decode(), name, "plan"), str(name))

        try:
            yield plan
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Read a problem from the standard input, write its plan to the standard output."""
    os.nice(LOWEST_PRIORITY)
    problem, planner, sizes = pickle.load(sys.stdin.buffer)
    plan, _ = planned_in_groups(problem, planner, make_score(problem), sizes, LIMIT)
    sys.stdout.write(json_text(plan_to_json(plan)))


if __name__ == "__main__":
    main()
