"""SpecTrain's headline figures (arXiv 1809.02839): its throughput over that of each baseline.

The simulator's figures of benchmarks/convergence/throughput.py, with four devices by the data sheet
of the paper's GPU. Those of the fastest links are computed again, without the search for the best
synchronous plan, which takes minutes: it is in the recorded table.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from claim import Claim
from reproduction.published import SPECTRAIN_FASTER

sys.path.append(str(Path(__file__).parents[1] / "convergence"))

from throughput import MODELS, RECORDED, row_of

PAPER = "SpecTrain"
PCIE = 12.0
OVER = {
    "data_parallel": "data parallelism",
    "no_pipelining": "model parallelism: without pipelining",
    "gpipe": "model parallelism: GPipe",
    "pipedream": "`pipedream`, which predicts nothing",
    "synchronous": "the best synchronous pipeline",
}
"""The claim about each baseline."""


def spectrain_claims(quick: bool) -> Iterator[Claim]:
    """A row for each model and baseline; they take a second, so ``quick`` leaves none out."""
    del quick
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    for model in MODELS:
        slower = [r for r in recorded if r["model"] == model.name and r["link_gb_per_s"] != PCIE]
        fast = next(r for r in recorded if (r["model"], r["link_gb_per_s"]) == (model.name, PCIE))
        fast |= row_of(model, PCIE)
        for baseline, words in OVER.items():
            yield speed_up(fast, slower, baseline, words)


def speed_up(
    fast: dict[str, Any],
    slower: list[dict[str, Any]],
    baseline: str,
    words: str,
) -> Claim:
    """Of `spectrain` over a baseline, on the fastest links and on the others."""

    def over(row: dict[str, Any]) -> float:
        return row[f"{baseline}_s"] / row["spectrain_s"]

    return Claim(
        PAPER,
        f"over {words}",
        f"4 GPUs, {fast['model']}, {PCIE:g} GB/s",
        SPECTRAIN_FASTER.get(baseline),
        over(fast),
        assumed=f"our model, {fast['model']}",
        varied={f"{row['link_gb_per_s']:g} GB/s": over(row) for row in slower},
    )
