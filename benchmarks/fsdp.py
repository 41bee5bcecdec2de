"""Published FSDP runs beside what is predicted of one stage whose devices divide parameters.

    python benchmarks/fsdp.py            # prints the table, in seconds
    python benchmarks/fsdp.py --write    # also puts it into docs/benchmarks/predictions.md

The page says what the figures mean, and where they are from.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "predictions.md"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "largest")]

from decoder import Decoder, decoder_profile  # noqa: E402
from largest import with_table  # noqa: E402
from published_runs import GPUS_OF_HOST, LINKS, NVLINK_S, OPTIMIZER_BYTES, PORT_S  # noqa: E402

from penstock.cluster.cluster import Cluster, Device, Host  # noqa: E402
from penstock.measure.hardware import HARDWARE  # noqa: E402
from penstock.plan.plan import Plan, Stage  # noqa: E402
from penstock.plan.problem import PlanningProblem  # noqa: E402
from penstock.simulate.score import predict_plan  # noqa: E402
from penstock.simulate.simulation import Prediction  # noqa: E402

HEADING = "Predicted and published"

SHAPES = {
    "Llama 2 13B": (40, 5120, 40, 40, 13824, 4096, 32000),
    "Llama 2 34B": (48, 8192, 64, 8, 22016, 4096, 32000),
    "Llama 2 70B": (80, 8192, 64, 8, 28672, 4096, 32000),
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 8192, 128256),
    "Llama 3 70B": (80, 8192, 64, 8, 28672, 8192, 128256),
}
"""Blocks, hidden size, heads, those with keys of their own, inner size; words of a sample, and of
the vocabulary."""


@dataclass(frozen=True)
class Run:
    """A published run: ``recompute`` is "none", "half" of the forward, or "all" of it."""

    source: str
    model: str
    gpus: int
    samples: int
    recompute: Literal["none", "half", "all"]
    how: str
    tokens_per_s: float

    @property
    def device(self) -> str:
        """The kind of GPU."""
        return "H100-80GB" if self.source == "titan-h100" else "A100-80GB"


RUNS = (
    Run("titan-a100", "Llama 3 8B", 64, 1, "half", "selective layer", 2904),
    Run("titan-a100", "Llama 3 8B", 64, 1, "half", "selective op", 2973),
    Run("titan-a100", "Llama 3 70B", 64, 1, "all", "full", 331),
    Run("titan-a100", "Llama 2 13B", 64, 2, "none", "no", 2162),
    Run("titan-a100", "Llama 2 13B", 64, 2, "half", "selective layer", 1914),
    Run("titan-a100", "Llama 2 13B", 64, 2, "half", "selective op", 1904),
    Run("titan-a100", "Llama 2 70B", 64, 1, "half", "selective op", 355),
    Run("titan-a100", "Llama 2 70B", 64, 2, "all", "full", 353),
    Run("titan-h100", "Llama 3 8B", 8, 2, "half", "selective", 5762),
    Run("titan-h100", "Llama 3 8B", 8, 2, "half", "selective, compiled", 6667),
    Run("titan-h100", "Llama 3 8B", 128, 2, "half", "selective", 5605),
    Run("titan-h100", "Llama 3 8B", 128, 2, "half", "selective, compiled", 6514),
    Run("ibm", "Llama 2 34B", 128, 8, "all", "yes", 772),
    Run("ibm", "Llama 2 70B", 128, 6, "all", "yes", 380),
)


def problem_of(run: Run) -> PlanningProblem:
    """The model of a run on its GPUs, all of which take their samples in one micro-batch."""
    blocks, hidden, heads, key_heads, inner, words, vocabulary = SHAPES[run.model]
    shape = Decoder(
        blocks,
        hidden,
        heads,
        words,
        vocabulary,
        key_heads,
        inner,
        gated=True,
        tied=False,
        fused_attention=True,
    )
    hardware = HARDWARE[run.device]
    link, port = LINKS[run.device]
    devices = (Device(run.device, hardware.memory_bytes),) * GPUS_OF_HOST
    hosts = (
        Host(f"host {i}", devices, link, GPUS_OF_HOST * port, NVLINK_S, PORT_S)
        for i in range(run.gpus // GPUS_OF_HOST)
    )
    batch = run.gpus * run.samples
    return PlanningProblem(
        decoder_profile(shape, 1, run.device, hardware, run.samples),
        Cluster(f"{run.gpus} {run.device}", tuple(hosts)),
        batch,
        (batch,),
        OPTIMIZER_BYTES,
    )


def predictions(run: Run) -> tuple[Prediction, Prediction]:
    """Without recompute, and by block."""
    problem = problem_of(run)
    stage = Stage(
        range(len(problem.profile.layers)),
        tuple(range(run.gpus)),
        (run.samples,) * run.gpus,
        sharding="parameters",
    )
    kept, again = (
        predict_plan(
            problem,
            Plan((replace(stage, by_block=again),), 1, problem.global_batch, "1f1b"),
            with_timeline=False,
        )
        for again in (False, True)
    )
    return kept, again


def predicted_tokens_per_s(run: Run) -> float:
    """Tokens a second of each GPU; where half of the forward runs again, the mean time of both."""
    kept, again = predictions(run)
    share = {"none": 0.0, "half": 0.5, "all": 1.0}[run.recompute]
    seconds = (1 - share) * kept.iteration_s + share * again.iteration_s
    return run.samples * SHAPES[run.model][5] / seconds


def error_of(run: Run) -> float:
    """By how much the predicted time is too long, as a part of the published one."""
    return run.tokens_per_s / predicted_tokens_per_s(run) - 1


def table() -> str:
    """The runs as a table of the page."""
    heads = ("source", "model", "GPUs", "samples", "recompute", "published", "predicted", "error")
    lines = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|---|--:|--:|--:|"]
    for run in RUNS:
        cells = (
            run.source,
            run.model,
            f"{run.gpus} {run.device}",
            str(run.samples),
            f"{run.how} ({run.recompute})",
            f"{run.tokens_per_s:,.0f}",
            f"{predicted_tokens_per_s(run):,.0f}",
            f"{100 * error_of(run):+.1f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary() -> str:
    """The errors in a sentence."""
    errors = [abs(error_of(run)) for run in RUNS]
    middle, most = 100 * median(errors), 100 * max(errors)
    return (
        f"Over {len(RUNS)} runs the predicted time is off by {middle:.1f} % in the median, and by "
        f"{most:.1f} % at most."
    )


def main() -> None:
    """Print the table, and write it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/predictions.md")
    made = table()
    print(made, summary(), sep="\n\n")
    if parser.parse_args().write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(text, HEADING, made), encoding="utf-8")


if __name__ == "__main__":
    main()
