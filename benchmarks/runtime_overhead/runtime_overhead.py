"""Runtime overhead against torch.distributed.pipelining: same model, cut, schedule, processes.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/runtime_overhead/runtime_overhead.py

Two models: ``tiny`` (8 x (Linear 32 -> 32, ReLU), 4 rows a micro-batch, mean squared error), whose
iteration is nearly all overhead, and ``gpt`` (8 blocks of width 256, sequence 128, vocabulary
4096, 2 sequences a micro-batch). Iterations of the two runtimes alternate in the same processes,
so both meet the same noise; neither takes an optimizer step.

Overhead per action = (iteration - compute of the busiest rank) / compute actions of a rank; the
compute of a stage is timed alone, forward and backward without any communication.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from penstock.capture.chain import Chain
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline

RIVAL = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attention, then a two-layer perceptron, each added to its input."""
        rows, length, width = hidden.shape
        joint = self.projections(self.first_norm(hidden)).view(rows, length, 3, self.heads, -1)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.narrow(functional.gelu(self.wide(self.second_norm(hidden))))


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed ``(rows, length)`` tokens."""
        return self.token(tokens) + self.position.weight


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tiny_case(micro_batches: int) -> tuple[list[nn.Module], int, torch.Tensor, torch.Tensor]:
    """Modules, the first module of stage 1, inputs and targets of the tiny model."""
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8)]
    rows = 4 * micro_batches
    return modules, 4, torch.randn(rows, 32), torch.randn(rows, 32)


def gpt_case(micro_batches: int) -> tuple[list[nn.Module], int, torch.Tensor, torch.Tensor]:
    """Modules, the first module of stage 1, inputs and targets of the GPT-like model."""
    modules: list[nn.Module] = [Embedding(4096, 128, 256), *(Block(256, 4) for _ in range(8))]
    modules.append(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 4096, bias=False)))
    tokens = torch.randint(0, 4096, (2 * micro_batches, 129))
    return modules, 6, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main() -> None:
    """Time every model and schedule; rank 0 prints a table and writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--models", nargs="+", default=["tiny", "gpt"])
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % (os.cpu_count() or 1)})
    dist.init_process_group("gloo")
    results = []
    for model in arguments.models:
        rounds = arguments.rounds if model == "tiny" else max(5, arguments.rounds // 6)
        for schedule in RIVAL:
            results.append(compare(model, schedule, arguments.micro_batches, rounds))
    if dist.get_rank() == 0 and arguments.out:
        arguments.out.write_text(json.dumps({"results": results}, indent=1) + "\n")
    dist.destroy_process_group()


def compare(model: str, schedule: str, micro_batches: int, rounds: int) -> dict[str, object]:
    """Alternate iterations of both runtimes; medians, and the median of the paired ratios."""
    torch.manual_seed(0)
    case = tiny_case if model == "tiny" else gpt_case
    modules, cut, inputs, targets = case(micro_batches)
    loss = functional.mse_loss if model == "tiny" else token_loss
    rank = dist.get_rank()
    own = nn.Sequential(*(modules[:cut] if rank == 0 else modules[cut:]))
    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    rival = RIVAL[schedule](stage, micro_batches, loss_fn=loss)
    rows = len(inputs) // micro_batches
    plan = Plan(
        (
            Stage(range(0, cut), (0,), (rows,)),
            Stage(range(cut, len(modules) + 1), (1,), (rows,)),
        ),
        micro_batches,
        rows,
        schedule,
    )
    pipe = Pipeline(Chain(modules, loss=loss), plan, (inputs[: 2 * rows], targets[: 2 * rows]))

    def ours_step() -> None:
        pipe.step((inputs, targets))

    def rival_step() -> None:
        own.zero_grad()
        if rank == 0:
            rival.step(inputs, return_outputs=False)
        else:
            rival.step(target=targets, return_outputs=False)

    for _ in range(3):
        timed(ours_step), timed(rival_step)
    pairs = [(timed(ours_step), timed(rival_step)) for _ in range(rounds)]
    compute_s = busiest_compute_s(own, rank, inputs, targets, modules, cut, rows, loss)
    compute_s *= micro_batches
    pipe.close()
    ours_s, rival_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    actions = 2 * micro_batches
    result: dict[str, object] = {
        "model": model,
        "schedule": schedule,
        "micro_batches": micro_batches,
        "ours_s": ours_s,
        "rival_s": rival_s,
        "compute_s": compute_s,
        "ours_overhead_us_per_action": (ours_s - compute_s) / actions * 1e6,
        "rival_overhead_us_per_action": (rival_s - compute_s) / actions * 1e6,
        "iteration_ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "overhead_ratio": (ours_s - compute_s) / (rival_s - compute_s),
    }
    if rank == 0:
        print(json.dumps(result), flush=True)
    return result


def timed(step: Callable[[], None]) -> float:
    """Seconds from the first rank's start to the last rank's end of ``step``."""
    dist.barrier()
    start = time.perf_counter()
    step()
    spans = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(spans, torch.tensor([start, time.perf_counter()], dtype=torch.float64))
    return float(max(span[1] for span in spans) - min(span[0] for span in spans))


def busiest_compute_s(
    own: nn.Module,
    rank: int,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    modules: list[nn.Module],
    cut: int,
    rows: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> float:
    """Seconds of forward and backward of one micro-batch on the slower stage, both ranks busy."""
    given, wanted = inputs[:rows], targets[:rows]
    if rank == 1:
        with torch.no_grad():
            given = nn.Sequential(*modules[:cut])(given)
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        entering = given.detach().requires_grad_(given.is_floating_point())
        output = own(entering)
        if rank == 1:
            loss(output, wanted).backward()
        else:
            output.backward(torch.ones_like(output))
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()
