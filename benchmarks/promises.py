"""README's promises, each with the tests that hold it and their last run.

    python benchmarks/promises.py    # runs the tests, records how they ended, and writes the page

The record (`promises/results.json`) says when, on what machine and of which commit they ran.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

__all__ = ["PROMISES", "table"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "promises" / "results.json"
PAGE = ROOT / "docs" / "benchmarks" / "promises.md"

PROMISES: dict[str, str] = {
    "Gradients equal those of one device": (
        "tests/runtime/test_every_schedule_runs.py::test_it_trains_as_one_process"
    ),
    "A first step that differs from your own module's is not trained": (
        "tests/runtime/verify/test_verify.py::test_a_wrong_weight_of_the_loss_is_found"
    ),
    "No plan is faster than the bound of its class": (
        "tests/bounds/test_bounds_hold.py::test_no_plan_of_a_small_problem_beats_its_bounds"
    ),
    "On small problems no plan of whole backwards is faster than `search`": (
        "tests/search/test_search_is_optimal.py::test_search_reaches_the_least_time_of_every_plan"
    ),
    "The compiled simulator equals a plain one": (
        "tests/simulate/test_engines_agree.py::test_the_compiled_engine_equals_the_plain_one"
    ),
    "It equals an independent model in SimPy": (
        "tests/simulate/test_simpy_agrees.py::test_an_independent_model_gives_the_same_time"
    ),
    "DAPPLE's throughput comes out as published": (
        "tests/reproduction/test_dapple_runtime.py"
        "::test_throughput_is_within_two_percent_of_the_published"
    ),
    "A killed worker ends the run with one message": (
        "tests/system/test_train.py::test_a_killed_worker_ends_the_run_with_one_message"
    ),
    "Planning never loads torch, and works without it": "tests/test_without_torch.py",
    "Imports point down": "tests/test_architecture.py",
    "A sample of `transformers` is captured, cut and right, or refused": (
        "tests/capture/test_census.py"
    ),
}
"""What is promised, with the tests that a run here asks."""


def main() -> int:
    passed = outcomes()
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    machine = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": commit,
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    document = {"machine": machine, "passed": passed}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("\n| promise | tests |")
    PAGE.write_text(f"{head}\n" + "\n".join(table(document)) + "\n", encoding="utf-8")
    print("\n".join(table(document)))
    return 0 if all(count and not failed for count, failed in passed.values()) else 1


def outcomes() -> dict[str, tuple[int, int]]:
    """Of each promise, how many tests passed, and how many failed or could not run."""
    report = Path(tempfile.mkdtemp()) / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *PROMISES.values()]
    subprocess.run(command, cwd=ROOT, check=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    found = {}
    for promise, tests in PROMISES.items():
        path, _, name = tests.partition("::")
        module = path.removesuffix(".py").replace("/", ".")
        mine = [
            case
            for case in cases
            if case.get("classname", "").startswith(module)
            and case.get("name", "").startswith(name)
        ]
        bad = sum(
            case.find("failure") is not None or case.find("error") is not None for case in mine
        )
        found[promise] = len(mine) - bad, bad
    return found


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    found = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(found, platform.machine()).split()[:2])


def table(document: Mapping[str, Any]) -> Sequence[str]:
    """The page's table."""
    machine = document["machine"]
    lines = ["| promise | tests | passed | failed |", "|---|---|--:|--:|"]
    for promise, (passed, failed) in document["passed"].items():
        lines.append(f"| {promise} | `{PROMISES[promise]}` | {passed} | {failed} |")
    when = f"{machine['date'][:10]}, commit `{machine['commit']}`"
    where = f"{machine['cores']} cores of an {machine['processor']}, load {machine['load']:.0f}"
    return [*lines, "", f"All on {when}, {where}."]


if __name__ == "__main__":
    sys.exit(main())
