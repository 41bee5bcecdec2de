"""SpecTrain's headline figures (arXiv 1809.02839), from the recorded table of throughputs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from claim import Claim

__all__ = ["spectrain_claims"]

PAPER = "SpecTrain"
OVER_DATA_PARALLEL = {"fourth version": 8.91, "first version": 15.77}
OVER_MODEL_PARALLEL = 2.18
PCIE = 12.0
RECORDED = Path(__file__).parents[1] / "convergence" / "throughput.json"


def spectrain_claims(quick: bool) -> Iterator[Claim]:
    """All claims; they cost nothing, so ``quick`` leaves none out."""
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    over_data_parallel = {name_of(r): r["data_parallel_s"] / r["spectrain_s"] for r in rows}
    over_synchronous = {name_of(r): r["synchronous_s"] / r["spectrain_s"] for r in rows}
    fast = [name_of(row) for row in rows if row["link_gb_per_s"] == PCIE]
    claims = [
        (f"over data parallelism, the most, {version}", figure, over_data_parallel)
        for version, figure in OVER_DATA_PARALLEL.items()
    ]
    claims.append(("over model parallelism, the most", OVER_MODEL_PARALLEL, over_synchronous))
    for what, published, found in claims:
        best = max(fast, key=lambda name: found[name])
        yield Claim(
            PAPER,
            what,
            f"4 GPUs, {best}",
            published,
            found[best],
            varied={name: figure for name, figure in found.items() if name != best},
        )


def name_of(row: dict[str, Any]) -> str:
    """Model and links."""
    return f"{row['model']}, {row['link_gb_per_s']:g} GB/s"
