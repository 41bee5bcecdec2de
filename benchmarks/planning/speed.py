"""Whole processes of ``penstock plan``: wall and CPU seconds, and the most memory in use.

Run by ``benchmarks/planning.py --speed``. The limits are for CPU seconds, because other work may
share the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import write_cluster
from penstock.profile.json_file import write_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

MB, GB = 1e6, 1e9
GIVE_UP_S = 900.0


@dataclass(frozen=True)
class SpeedCase:
    """A command with the most CPU seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    budget_s: float


@dataclass(frozen=True)
class Speed:
    """What a process took, and how many processes were running when it ended, on average."""

    name: str
    budget_s: float
    wall_s: float
    cpu_s: float
    peak_bytes: float
    exit_code: int
    load: float


def transformer(layers: int) -> ModelProfile:
    """Equal blocks between an embedding and a head: 200 million parameters each, 2,048 tokens.

    Seconds are about those of an H100; all layers together need twice the memory of one.
    """
    costs = [
        LayerCost(
            f"block{i}",
            Affine(2e-4, 2.0e-3 * weight),
            Affine(2e-4, 2.0e-3 * weight),
            Affine(2e-4, 1.9e-3 * weight),
            round(400 * MB * weight),
            saved_bytes=Affine(0.0, 200 * MB * weight),
        )
        for i, weight in enumerate([0.6, *[1.0] * (layers - 2), 0.4])
    ]
    size = Affine(0.0, 16 * MB)
    edges = tuple(Edge(i, i + 1, f"hidden{i}", size, size) for i in range(layers - 1))
    return ModelProfile(f"transformer-{layers}", tuple(costs), edges, batch_size=4)


def branching_graph(nodes: int) -> str:
    """A PipeDream text: blocks of four branches of three nodes that join again, as in Inception."""
    lines: list[str] = []
    edges: list[str] = []

    def node(index: int, kind: str, weight: float) -> None:
        lines.append(
            f"node{index} -- {kind} -- forward_compute_time={weight:.3f}, "
            f"backward_compute_time={2 * weight:.3f}, activation_size={4e6 * weight:.1f}, "
            f"parameter_size={2e6 * weight:.1f}"
        )

    node(1, "Conv2d(3, 64)", 1.0)
    joined, count = 1, 1
    while count + 13 <= nodes:
        ends: list[int] = []
        for branch in range(4):
            before = joined
            for depth in range(3):
                count += 1
                node(count, f"Conv2d(branch {branch}.{depth})", 0.4 + 0.1 * ((branch + depth) % 3))
                edges.append(f"node{before} -- node{count}")
                before = count
            ends.append(before)
        count += 1
        node(count, "Concat(1)", 0.05)
        edges += [f"node{end} -- node{count}" for end in ends]
        joined = count
    while count < nodes:
        count += 1
        node(count, "Linear(64, 64)", 0.2)
        edges.append(f"node{joined} -- node{count}")
        joined = count
    return "\n".join([*lines, *(f"\t{edge}" for edge in edges)]) + "\n"


def speed_cases(folder: Path) -> list[SpeedCase]:
    """The commands; their made-up profiles are written to ``folder``."""
    write_profile(transformer(96), folder / "transformer-96.json")
    (folder / "graph-1250.txt").write_text(branching_graph(1250))
    bert = ("bert-48", "--cluster", "dapple-b", "--batch", "64")
    deep = f"{folder}/transformer-96.json"
    graph = (f"{folder}/graph-1250.txt", "--profile-batch", "32")
    write_profile(transformer(20), folder / "transformer-20.json")
    four = f"{folder}/four.toml"
    write_cluster(Cluster("four", (Host("host", (Device("H100", 80 * GB),) * 4, 1e9),)), four)
    others = {"gnmt-16": "1024", "inception-v3": "2048", "resnet-50": "2048"}
    return [
        SpeedCase("bert-48 on 16 devices, dapple", (*bert, "--planner", "dapple"), 1.0),
        SpeedCase("bert-48 on 16 devices, search", bert, 5.0),
        *(
            SpeedCase(f"{model} on 16", (model, "--cluster", "dapple-a", "--batch", batch), 5.0)
            for model, batch in others.items()
        ),
        SpeedCase("96 layers on 256", (deep, "--cluster", "h100-pod-256", "--batch", "512"), 20.0),
        SpeedCase(
            "96 layers on 1,024", (deep, "--cluster", "h100-pod-1024", "--batch", "2048"), 120.0
        ),
        *(
            SpeedCase(
                f"{Path(model).stem} on 4 devices, micro-batches of {size}",
                (model, "--cluster", four, "--batch", "96", "--micro-batch", str(size)),
                10.0,
            )
            for model, size in ((f"{folder}/transformer-20.json", 4), ("resnet-50", 8))
        ),
        SpeedCase("1,250 nodes on 16", (*graph, "--cluster", "dapple-a", "--batch", "512"), 10.0),
    ]


def timed(case: SpeedCase) -> Speed:
    """One process of ``penstock plan``, ended after `GIVE_UP_S`."""
    program = "from penstock.cli import main; main()"
    command = [sys.executable, "-c", program, "plan", *case.arguments, "--quiet", "--json"]
    # Python's own byte code is kept between processes too, as it is for everybody.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start_s = perf_counter()
    # Not subprocess.run: only wait4 tells what this one child has used.
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables)
    stopper = threading.Timer(GIVE_UP_S, child.kill)
    stopper.start()
    _, status, usage = os.wait4(child.pid, 0)
    stopper.cancel()
    wall_s = perf_counter() - start_s
    child.returncode = os.waitstatus_to_exitcode(status)
    return Speed(
        case.name,
        case.budget_s,
        wall_s,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024.0,
        child.returncode,
        os.getloadavg()[0],
    )


def measure_speed(out: Path, machine: dict[str, object], only: str = "") -> int:
    """Time the cases whose name contains ``only``, write JSON and Markdown; 1 where one failed.

    Cases that are not timed now keep their rows, each of which has its own machine and date.
    """
    machine |= {name: version(name) for name in ("numpy", "typer")}
    rows: dict[str, dict[str, Any]] = {}
    if out.exists():
        rows = {row["name"]: row for row in json.loads(out.read_text())["speeds"]}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        cases = speed_cases(Path(folder))
        for case in cases:
            if only not in case.name:
                continue
            speed = timed(case)
            failed = failed or speed.exit_code != 0
            rows[case.name] = asdict(speed) | {"machine": machine}
            print(row_of(rows[case.name]), flush=True)
            in_order = [rows[known.name] for known in cases if known.name in rows]
            out.write_text(json.dumps({"speeds": in_order}, indent=1) + "\n")
            out.with_suffix(".md").write_text(speed_table(in_order) + "\n")
    return 1 if failed else 0


def speed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the page: a line for each command."""
    head = [
        "| command | wall | CPU | limit, CPU | load | peak memory | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(row_of, rows)])


def row_of(row: Mapping[str, Any]) -> str:
    """A line of the table."""
    end = "" if row["exit_code"] == 0 else f" (exit code {row['exit_code']})"
    memory = f"{row['peak_bytes'] / GB:.2f} GB" if row["peak_bytes"] else "-"
    return (
        f"| {row['name']}{end} | {row['wall_s']:.2f} s | {row['cpu_s']:.2f} s | "
        f"{row['budget_s']:g} s | {row['load']:.1f} | {memory} | "
        f"{row['machine']['commit']} |"
    )
