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

sys.path.append(str(Path(__file__).parents[1] / "convergence"))

from throughput import MODELS, RECORDED, row_of

__all__ = ["spectrain_claims"]

PAPER = "SpecTrain"
PCIE = 12.0
OVER: dict[str, tuple[str, float | None]] = {
    "data_parallel": ("data parallelism", 8.91),
    "no_pipelining": ("model parallelism: without pipelining", 2.18),
    "gpipe": ("model parallelism: GPipe", None),
    "pipedream": ("`pipedream`, which predicts nothing", None),
    "synchronous": ("the best synchronous pipeline", None),
}
"""What the claim says of each baseline, and the largest published speed-up over it."""


def spectrain_claims(quick: bool) -> Iterator[Claim]:
    """A row for each model and baseline; they take a second, so ``quick`` leaves none out."""
    del quick
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    for model in MODELS:
        slower = [r for r in recorded if r["model"] == model.name and r["link_gb_per_s"] != PCIE]
        fast = next(r for r in recorded if (r["model"], r["link_gb_per_s"]) == (model.name, PCIE))
        fast |= row_of(model, PCIE)
        for baseline, (words, published) in OVER.items():
            yield speed_up(fast, slower, baseline, words, published)


def speed_up(
    fast: dict[str, Any],
    slower: list[dict[str, Any]],
    baseline: str,
    words: str,
    published: float | None,
) -> Claim:
    """Of `spectrain` over a baseline, on the fastest links and on the others."""

    def over(row: dict[str, Any]) -> float:
        return row[f"{baseline}_s"] / row["spectrain_s"]

    return Claim(
        PAPER,
        f"over {words}",
        f"4 GPUs, {fast['model']}, {PCIE:g} GB/s",
        published,
        over(fast),
        assumed=f"our model, {fast['model']}",
        varied={f"{row['link_gb_per_s']:g} GB/s": over(row) for row in slower},
    )
