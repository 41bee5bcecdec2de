"""What verification adds to the first step of a training, as a multiple of a plain step.

    python benchmarks/verify.py [--rounds 9] [--out results.json]
    python benchmarks/verify.py --smallest

In each round every rank takes the first two steps of a training that compares its first step, and
of one that does not; which comes first alternates. What verification adds is the difference of the
two first steps. It is divided by the second step of the training that compares nothing. Seconds on
the clock are those between barriers on rank 0, CPU seconds those of all ranks together.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from time import strftime
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.jobs.job_file import find_job
from penstock.jobs.profile_job import build_and_capture
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers

RESULTS = Path(__file__).parent / "verify" / "results.json"
MICRO_BATCHES = 4

Subject = tuple[LayerGraph, Any]
"""A captured model and a batch."""


@dataclass(frozen=True)
class Seconds:
    """How long something took: on the clock, and of this rank's processor."""

    wall: float
    cpu: float


def gpt_text() -> Subject:
    """The built-in job, without dropout."""
    job = find_job("gpt-text")
    return build_and_capture(job), job.example_batch()


def bert() -> Subject:
    """Four layers of width 128, with dropout as transformers has it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
    )
    ids = torch.randint(5, 1000, (16, 64))
    batch = {"input_ids": ids, "labels": ids}
    return capture_model(transformers.BertForMaskedLM(config), batch), batch


SUBJECTS: dict[str, Callable[[], Subject]] = {"gpt-text": gpt_text, "bert": bert}


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smallest", action="store_true", help="one case, nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    smallest = arguments.smallest
    cases = [(s, w) for s in SUBJECTS for w in (1, 2)] if not smallest else [("gpt-text", 1)]
    document: dict[str, Any] = {"machine": machine(), "cases": []}
    for subject, ranks in cases:
        measured = (subject, 2 if smallest else arguments.rounds)
        by_rank = launch_workers(rounds_of, measured, workers=ranks, threads=1)
        document["cases"].append(summary(subject, by_rank))
        print(json.dumps(document["cases"][-1]), flush=True)
    document["machine"]["load_at_the_end"] = os.getloadavg()[0]
    if not smallest:
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def rounds_of(subject: str, rounds: int) -> tuple[str, list[dict[str, Seconds]]]:
    """How the first step compared, and what a rank measures in each round after one to warm up."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    graph, batch = SUBJECTS[subject]()
    found: list[dict[str, Seconds]] = []
    verified = ""
    for number in range(rounds + 1):
        row: dict[str, Seconds] = {}
        for mode in ("off", "first-step") if number % 2 else ("first-step", "off"):
            row[f"{mode} 1"], row[f"{mode} 2"], said = two_steps(graph, batch, mode)
            verified = said or verified
        found.append(row)
    return verified, found[1:]


def two_steps(
    graph: LayerGraph, batch: Any, verify: Literal["first-step", "off"]
) -> tuple[Seconds, Seconds, str]:
    """The first two steps of a training that leaves the weights as they are."""

    def standing_still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    plan = plan_of(graph, batch)
    with Pipeline(graph, plan, batch, optimizer=standing_still, verify=verify) as pipe:
        first, second = timed(pipe, batch), timed(pipe, batch)
        result = pipe.verified
    if result is not None and not result.equal:
        raise RuntimeError(f"nothing was compared: {result}")
    return first, second, str(result or "")


def timed(pipe: Pipeline, batch: Any) -> Seconds:
    """One step, from and to a point that all ranks have reached."""
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    pipe.step(batch)
    cpu = time.process_time() - cpu
    wait()
    return Seconds(time.perf_counter() - wall, cpu)


def wait() -> None:
    """For all ranks."""
    if dist.is_initialized():
        dist.barrier()


def plan_of(graph: LayerGraph, batch: Any) -> Plan:
    """A stage on every rank, of equally many layers."""
    count = dist.get_world_size() if dist.is_initialized() else 1
    rows = graph.batch_leaves(batch)[0].shape[0] // MICRO_BATCHES
    layers = len(graph.layer_names)
    stages = (
        Stage(range(layers * rank // count, layers * (rank + 1) // count), (rank,), (rows,))
        for rank in range(count)
    )
    return Plan(tuple(stages), MICRO_BATCHES, rows, "1f1b")


def summary(
    subject: str, by_rank: tuple[tuple[str, list[dict[str, Seconds]]], ...]
) -> dict[str, Any]:
    """Ratios of one case, by clock and by processor."""
    verified, _ = by_rank[0]
    plain: list[tuple[float, float]] = []
    ratios: list[tuple[float, float]] = []
    for number in range(len(by_rank[0][1])):
        rows = [table[number] for _, table in by_rank]
        step, first, compared = (
            (rows[0][what].wall, sum(row[what].cpu for row in rows))
            for what in ("off 2", "off 1", "first-step 1")
        )
        plain.append(step)
        added = [after - before for before, after in zip(first, compared, strict=True)]
        ratios.append((added[0] / step[0], added[1] / step[1]))
    return {
        "model": subject,
        "ranks": len(by_rank),
        "transport": "shared memory" if len(by_rank) > 1 else "none",
        "rounds": len(plain),
        "verified": verified,
        "plain_step_s": spread(plain),
        "added_over_plain": spread(ratios),
    }


def spread(pairs: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """The quartiles by clock and by processor."""
    return {
        "wall": quartiles([wall for wall, _ in pairs]),
        "cpu": quartiles([cpu for _, cpu in pairs]),
    }


def quartiles(values: list[float]) -> dict[str, float]:
    """Median, first and third quartile."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartile_1": low, "quartile_3": high}


TITLES = {
    "gpt-text": "`gpt-text`, without dropout",
    "bert": "BERT of 4 layers of width 128, with dropout",
}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """The cases as on the page: medians with first and third quartile."""
    lines = [
        "| model | ranks | between ranks | plain step, processor time of all ranks "
        "| added, processor time | added, on the clock |",
        "|---" * 6 + "|",
    ]
    for case in cases:
        between = "-" if case["transport"] == "none" else case["transport"]
        plain = f"{case['plain_step_s']['cpu']['median']:.2f} s"
        added = (
            "{median:.2f} ({quartile_1:.2f} to {quartile_3:.2f})".format(
                **case["added_over_plain"][clock]
            )
            for clock in ("cpu", "wall")
        )
        cells = " | ".join((TITLES[case["model"]], str(case["ranks"]), between, plain, *added))
        lines.append(f"| {cells} |")
    return lines


def machine() -> dict[str, Any]:
    """Where and when, and how busy it was."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "date": strftime("%Y-%m-%d %H:%M"),
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads_a_rank": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_at_the_start": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
