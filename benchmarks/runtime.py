"""Overhead of the runtime, beside torch.distributed.pipelining in the same processes.

    python benchmarks/runtime.py --quick --json
    python benchmarks/runtime.py [--only PART] [--out results.json]

The script starts its own rank processes, one thread each, every rank on a core of its own as far as
there are cores. Parts: ``overhead`` (seconds beyond the ideal of an action, on a model that hardly
computes; all that ``--quick`` measures), ``gloo`` (the same, our messages through Gloo as the
rival's are), ``efficiency`` (a GPT-like model), ``memory`` (the peak of
each rank), ``data-parallel`` (against DistributedDataParallel).
docs/benchmarks/runtime.md says what is measured, and how.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from time import strftime
from typing import Any

import torch

from penstock.machine import processor_name

HERE = Path(__file__).parent / "runtime"
MICRO_BATCHES = 32
LIMIT_S = 3600.0

SHARED = (*("1f1b", "gpipe", "interleaved", "breadth-first", "zero-bubble", "zb-v", "dualpipe-v"),)
OWN = ("hanayo", "chimera", "dualpipe", "zb-h1", "zb-h2", "v-half", "v-min", "list", "wavefront")
FOUR_RANKS = ("1f1b", "interleaved", "zb-v")
PARTS = (
    "overhead",
    "gloo",
    "efficiency",
    "memory",
    "data-parallel",
)


def main() -> None:
    """Measure the given parts; print tables, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="overhead only, in few rounds")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--out", type=Path, help=f"where to write them (all: {HERE.name}/)")
    parser.add_argument("--smallest", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    document: dict[str, Any] = {"machine": machine()}
    arguments.quick |= arguments.smallest
    parts = ["overhead"] if arguments.quick else list(PARTS)
    if arguments.only:
        parts = [arguments.only]
    if arguments.only and arguments.out and arguments.out.exists():
        # The other parts stay; this one was measured on a machine of its own.
        document = json.loads(arguments.out.read_text(encoding="utf-8"))
        document[f"{arguments.only}_machine"] = machine()
    for part in parts:
        document[part] = measure(part, arguments.quick, arguments.smallest)
        if not arguments.json:
            print("\n".join([*table(part, document[part]), ""]), flush=True)
    if arguments.json:
        print(json.dumps(ratios(document) | ({} if arguments.quick else document)))
    out = arguments.out
    if not (out or arguments.quick or arguments.only):
        out = HERE / "results.json"
    if out:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(part: str, quick: bool, smallest: bool) -> Any:
    """The rows of one part."""
    from starting import run_tasks

    match part:
        case "overhead" if smallest:
            return run_tasks([tiny("1f1b", 2, 4), tiny("zb-h1", 2, 4)], 2, LIMIT_S)
        case "overhead":
            rounds = 16 if quick else 60
            rows = run_tasks([tiny(name, rounds) for name in (*SHARED, *OWN)], 2, LIMIT_S)
            return rows + run_tasks([tiny(name, rounds) for name in FOUR_RANKS], 4, LIMIT_S)
        case "gloo":
            tasks = [tiny(name, 30, transport="process-groups") for name in SHARED]
            rows = run_tasks(tasks, 2, LIMIT_S)
            tasks = [tiny(name, 30, transport="process-groups") for name in FOUR_RANKS]
            return rows + run_tasks(tasks, 4, LIMIT_S)
        case "efficiency":
            return run_tasks([gpt(name, 16, 6) for name in (*SHARED, *OWN)], 2, LIMIT_S)
        case "memory":
            return [
                run_tasks([memory(name, count, whose)], 2, LIMIT_S)[0]
                for name in ("1f1b", "gpipe", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")
                for count in (4, MICRO_BATCHES)
                for whose in ("ours", "rival")
            ]
        case _:
            settings = {"model_name": "gpt", "micro_batches": MICRO_BATCHES, "rounds": 8}
            return run_tasks([("data_parallel", settings)], 2, LIMIT_S)


def tiny(
    name: str, rounds: int, micro_batches: int = MICRO_BATCHES, transport: str = "auto"
) -> tuple[str, dict[str, Any]]:
    """Overhead of one schedule."""
    return "compare", {
        "name": name,
        "model_name": "tiny",
        "micro_batches": micro_batches,
        "rounds": rounds,
        "repeats": 20,
        "transport": transport,
    }


def gpt(name: str, micro_batches: int, rounds: int) -> tuple[str, dict[str, Any]]:
    """Efficiency of one schedule."""
    return "compare", {
        "name": name,
        "model_name": "gpt",
        "micro_batches": micro_batches,
        "rounds": rounds,
        "repeats": 3,
    }


def memory(name: str, micro_batches: int, whose: str) -> tuple[str, dict[str, Any]]:
    """Peaks under one schedule, in processes of their own."""
    return "memory", {
        "name": name,
        "model_name": "gpt",
        "micro_batches": micro_batches,
        "whose": whose,
    }


def ratios(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Overhead by schedule and ranks: ours over the rival's, and over the limit."""
    rows = document.get("overhead", [])
    key = {id(row): f"{row['case']}/{row['ranks']}" for row in rows}
    return {
        "overhead_ratio": {
            key[id(row)]: row["overhead_ratio"] for row in rows if row["rival_s"] is not None
        },
        "limit_ratio": {key[id(row)]: row["limit_ratio"] for row in rows},
    }


def table(part: str, rows: list[dict[str, Any]]) -> list[str]:
    """The rows of a part as on the page, as Markdown; else as they are."""
    from tables import page_tables

    return page_tables({part: rows}).get(part, [json.dumps(row, indent=1) for row in rows])


def machine() -> dict[str, object]:
    """Machine and date."""
    return {
        "date": strftime("%Y-%m-%d %H:%M"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "commit": commit(),
    }


def commit() -> str:
    """The commit of the code that is measured."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
