"""Estimated speeds of training on absent GPUs, against speeds that others have published.

Each row is a public run on one kind of GPU in which no tensor was divided (fully sharded data
parallelism, whose messages overlap with computing): its GPUs each do forward and backward of their
own micro-batches, and the forward once more where activations are checkpointed. So

    tokens a second on a GPU = tokens of a micro-batch / (forward + backward [+ forward])

where the seconds are those of `penstock.measure.roofline.estimate_profile`. The optimizer's step
and messages that are not hidden are left out, so an estimate should be fast rather than slow.

    python benchmarks/hardware.py            prints the table and writes hardware/results.json
"""

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock import capture_model
from penstock.measure.roofline import estimate_profile

RESULTS = Path(__file__).parent / "hardware" / "results.json"
MOSAIC = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md (read 2026-11-22)"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1"


@dataclass(frozen=True)
class Shape:
    """A decoder: width, blocks, heads, heads of keys, width inside the feed-forward, vocabulary."""

    width: int
    blocks: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    gated: bool = False


MPT = {
    "125m": Shape(768, 12, 12, 12, 3072, 50368),
    "1b": Shape(2048, 24, 16, 16, 8192, 50368),
    "3b": Shape(2560, 32, 20, 20, 10240, 50368),
    "7b": Shape(4096, 32, 32, 32, 16384, 50368),
    "13b": Shape(5120, 40, 40, 40, 20480, 50368),
    "30b": Shape(7168, 48, 56, 56, 28672, 50368),
}
LLAMA_8B = Shape(4096, 32, 32, 8, 14336, 128256, gated=True)


@dataclass(frozen=True)
class Run:
    """A published run; ``tokens_per_s`` is of one GPU."""

    model: str
    shape: Shape
    hardware: str
    tokens: int
    micro_batch: int
    checkpointed: bool
    tokens_per_s: float
    source: str
    compiled: bool = False


def mosaic(
    size: str, hardware: str, tokens: int, micro_batch: int, speed: float, again: bool = False
) -> Run:
    """A row of llm-foundry's tables, eight GPUs, bfloat16."""
    return Run(f"MPT-{size}", MPT[size], hardware, tokens, micro_batch, again, speed, MOSAIC)


RUNS = (
    mosaic("125m", "A100-80GB", 2048, 40, 142830),
    mosaic("1b", "A100-80GB", 2048, 14, 20513),
    mosaic("3b", "A100-80GB", 2048, 10, 10811),
    mosaic("7b", "A100-80GB", 2048, 6, 4641),
    mosaic("7b", "A100-80GB", 8192, 8, 3206, again=True),
    mosaic("13b", "A100-80GB", 2048, 2, 2262),
    mosaic("30b", "A100-80GB", 2048, 3, 916, again=True),
    mosaic("1b", "H100-80GB", 2048, 14, 45455),
    mosaic("3b", "H100-80GB", 4096, 5, 20964),
    mosaic("7b", "H100-80GB", 2048, 6, 10643),
    mosaic("7b", "H100-80GB", 8192, 8, 6935, again=True),
    mosaic("13b", "H100-80GB", 2048, 2, 4792),
    mosaic("30b", "H100-80GB", 2048, 3, 2002, again=True),
    Run("Llama-3.1-8B", LLAMA_8B, "H100-80GB", 8192, 2, False, 5762, TITAN),
    Run("Llama-3.1-8B", LLAMA_8B, "H100-80GB", 8192, 2, False, 6667, TITAN, compiled=True),
)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.size = shape.heads, shape.width // shape.heads
        rest = 2 * shape.key_heads * self.size
        self.parts = (shape.width, rest // 2, rest // 2)
        self.enter = nn.Linear(shape.width, shape.width + rest, bias=False)
        self.leave = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.enter(x).split(self.parts, -1)
        )
        found = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != self.heads
        )
        return self.leave(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(shape.width), norm(shape.width)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(x)).float()


def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def estimated_tokens_per_s(run: Run) -> float:
    """Tokens a second on one GPU, estimated; equal blocks are estimated once."""
    shape = run.shape
    with torch.device("meta"):
        parts = [nn.Embedding(shape.vocabulary, shape.width), Block(shape), Head(shape)]
    model = nn.Sequential(*parts).to(torch.bfloat16)
    tokens = torch.zeros((run.micro_batch, run.tokens), dtype=torch.long)
    graph = capture_model(model, (tokens, tokens), loss=loss, granularity="block")
    profile = estimate_profile(
        graph, (tokens, tokens), run.hardware, batch_sizes=(run.micro_batch,), compiled=run.compiled
    )
    repeats = [1, shape.blocks, 1, 1]
    rows = run.micro_batch
    forward_s = sum(n * c.forward_s.at(rows) for n, c in zip(repeats, profile.layers, strict=True))
    backward_s = sum(
        n * c.backward_s.at(rows) for n, c in zip(repeats, profile.layers, strict=True)
    )
    seconds = forward_s * (2 if run.checkpointed else 1) + backward_s
    return run.micro_batch * run.tokens / seconds


def measured_rows() -> list[dict[str, Any]]:
    """Every run with its estimate."""
    rows: list[dict[str, Any]] = []
    for run in RUNS:
        estimated = estimated_tokens_per_s(run)
        error = estimated / run.tokens_per_s - 1
        rows.append({**asdict(run), "estimated_tokens_per_s": estimated, "error": error})
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = [
        "| model | GPU | tokens | micro-batch | published tokens/s | estimated | error |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        notes = [name for name in ("checkpointed", "compiled") if row[name]]
        model = ", ".join([row["model"], *notes])
        lines.append(
            f"| {model} | {row['hardware']} | {row['tokens']} | {row['micro_batch']} | "
            f"{row['tokens_per_s']:.0f} | {row['estimated_tokens_per_s']:.0f} | "
            f"{row['error']:+.1%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the results")
    write = parser.parse_args().write
    rows = measured_rows()
    print("\n".join(table(rows)))
    within = sum(abs(row["error"]) <= 0.2 for row in rows)
    print(f"{within} of {len(rows)} within 20 %")
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if write:
        RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
