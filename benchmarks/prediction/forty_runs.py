"""Forty runs, predicted beforehand: models, schedules, 1 to 4 ranks, transports, networks.

    python benchmarks/prediction/forty_runs.py --out benchmarks/prediction/forty_runs.json
    python benchmarks/prediction/forty_runs.py --beside-load --out benchmarks/prediction/loaded.json

Five models train under eight settings each. Layers and links are measured before every run, as a
job does it, and the plan is simulated from that. On one host messages go through shared memory. Two
hosts are network namespaces with one core each, joined by the kernel's token-bucket filters (root
on Linux); `penstock train` under torchrun measures, plans, predicts and trains there, and Gloo
carries the messages. The first plan of each model is measured and trained a second time at the end:
the difference is the noise of the machine. With ``--beside-load`` another program computes all the
time on the last core.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "rehearsal"))

from host_networks import PORT, joined_hosts
from measured_runs import balanced, measured_costs, processor, run
from other_load import other_load

from penstock.train.job_file import find_job

HERE = Path(__file__).parent
JOBS = (
    "gpt-text",
    "resnet-digits",
    str(HERE / "forty" / "t5.toml"),
    str(HERE / "forty" / "vit.toml"),
    str(HERE / "forty" / "lstm.toml"),
)
STEPS = 20
LIMIT_S = 300.0
GIGABIT = 125e6


@dataclass(frozen=True)
class LocalCase:
    """A plan of one host: how many replicas each stage has, and the schedule.

    Under ``auto`` the planner chooses both, for this number of ranks.
    """

    replicas: tuple[int, ...]
    schedule: str


@dataclass(frozen=True)
class HostCase:
    """Two hosts with some ranks each; the planner keeps to a schedule, or chooses."""

    ranks: int
    bytes_per_s: float
    schedule: str


LOCAL = (
    LocalCase((1,), "1f1b"),
    LocalCase((1, 1), "1f1b"),
    LocalCase((2,), "auto"),
    LocalCase((2,), "1f1b"),
    LocalCase((3,), "auto"),
    LocalCase((1, 1, 1, 1), "1f1b"),
)
HOSTS = (HostCase(1, GIGABIT, "auto"), HostCase(2, GIGABIT, "auto"))


def plan_words(replicas: Sequence[int], schedule: str) -> str:
    """A plan's name in the results."""
    return f"{'+'.join(map(str, replicas))} {schedule}"


def local_rows(name: str) -> list[dict[str, Any]]:
    """The runs of a model on one host, and the first of them again.

    Stages are as even as possible under 1F1B, or what `penstock train` chooses.
    """
    job = find_job(name)
    rows: list[dict[str, Any]] = []
    for case in (*LOCAL, LOCAL[0]):
        ranks = sum(case.replicas)
        costs = measured_costs(job, ranks)
        given = balanced(job, costs, case.replicas, "1f1b") if case.schedule == "1f1b" else None
        plan, figures = run(job, costs, given, STEPS, ranks)
        transport = "shared memory" if ranks > 1 else "none"
        words = plan_words([len(stage.devices) for stage in plan.stages], plan.schedule)
        rows.append(row(job.name, words, ranks, transport, "one host", figures))
    return rows


def host_row(name: str, case: HostCase) -> dict[str, Any]:
    """A run on two hosts."""
    shown = find_job(name).name
    with tempfile.TemporaryDirectory() as folder, other_load() as load:
        out = Path(folder) / "run"
        job = Path(folder) / "job.toml"
        job.write_text(job_text(name))
        command = ["train", str(job), "--schedule", case.schedule, "-o", str(out)]
        on_two_hosts(case, command)
        summary = json.loads((out / "summary.json").read_text())
        plan = json.loads((out / "plan.json").read_text())
    predicted_s, measured_s = summary["predicted_s"], summary["measured_s"]
    figures = {
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        "others_cores": round(load.cores, 2),
    }
    words = plan_words([len(stage["devices"]) for stage in plan["stages"]], plan["schedule"])
    network = f"two hosts, {case.bytes_per_s * 8 / 1e9:.0f} Gb/s"
    return row(shown, words, 2 * case.ranks, "process groups", network, figures)


def job_text(name: str) -> str:
    """The job without checkpoints and evaluations, in few steps."""
    text = Path(name).read_text() if name.endswith(".toml") else f'base = "{name}"\n'
    return f"steps = {STEPS}\nevaluate_every = 0\ncheckpoint_every = 0\n{text}"


def on_two_hosts(case: HostCase, command: list[str]) -> None:
    """Run a command of penstock by a torchrun on each of two hosts."""
    paths = [str(HERE), str(HERE / "forty"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": PORT,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    cores = sorted(os.sched_getaffinity(0))
    with joined_hosts(["host0", "host1"], [case.bytes_per_s] * 2) as networks:
        agents = [
            subprocess.Popen(
                [
                    *network.host_prefix,
                    *("taskset", "--cpu-list", str(cores[number % len(cores)])),
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                    *(f"--node-rank={number}", f"--nproc-per-node={case.ranks}"),
                    *(f"--master-addr={networks[0].address}", "--master-port=29500"),
                    *("--no-python", str(Path(sys.executable).with_name("penstock")), *command),
                ],
                env=environment,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
            for number, network in enumerate(networks)
        ]
        try:
            said = [agent.communicate(timeout=LIMIT_S)[1] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    if any(agent.returncode for agent in agents):
        sys.exit("\n".join(said))


def row(
    model: str, plan: str, ranks: int, transport: str, network: str, figures: dict[str, float]
) -> dict[str, Any]:
    """One line of the results, printed."""
    print(
        f"{model:9} {plan:14} {ranks} ranks, {transport}, {network}: predicted "
        f"{figures['predicted_s'] * 1e3:7.1f} ms, measured {figures['measured_s'] * 1e3:7.1f} ms, "
        f"error {figures['error']:+.1%}; others used {figures['others_cores']} cores",
        flush=True,
    )
    return {
        "model": model,
        "plan": plan,
        "ranks": ranks,
        "transport": transport,
        "network": network,
        **figures,
    }


@contextmanager
def busy_loop() -> Iterator[None]:
    """Run a program on the last core in the block, which computes without a pause."""
    core = max(os.sched_getaffinity(0))
    program = [sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(["taskset", "--cpu-list", str(core), *program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Run the jobs and write the results."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beside-load", action="store_true", help="beside a busy loop")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    for name in arguments.jobs:
        with busy_loop() if arguments.beside_load else nullcontext():
            *first, second = local_rows(name)
            rows += [*first, *(host_row(name, case) for case in HOSTS)]
        again.append(second)
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "steps": STEPS,
            "rows": rows,
            "again": again,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
