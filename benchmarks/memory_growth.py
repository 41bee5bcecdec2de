"""Growth of each rank's peak memory from 8 to 64 micro-batches, simulated and measured.

`python benchmarks/memory_growth.py` trains a small model on two workers under every schedule that
the runtime runs, over both transports, and prints the peaks with few and with many micro-batches;
with `--json` for a program. Its exit status is 1 if one grows by over 5 % more than the simulator
says. Bytes are counted, so other work on the machine changes nothing.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import inf

import torch
import torch.distributed as dist
from torch import nn

from penstock.capture.capture import capture_model
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.measure.layer_times import measure_profile
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.settings import Safety
from penstock.runtime.transport.transport import TransportChoice
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import placement_of_style
from penstock.simulate.simulation import simulate_plan

FEW, MANY = 8, 64
ROWS, LENGTH, WIDTH, LAYERS = 4, 256, 64, 4
ALLOWED = 1.05
TRANSPORTS: tuple[TransportChoice, ...] = ("process-groups", "shared-memory")


@dataclass(frozen=True)
class Row:
    """One rank under one schedule: peaks in bytes with few and with many micro-batches."""

    schedule: str
    transport: str
    rank: int
    predicted: tuple[float, float]
    measured: tuple[float, float]

    @property
    def excess(self) -> float:
        """The measured growth over the predicted one, each as a factor."""
        (few, many), (least, most) = self.predicted, self.measured
        return (most / least) / (many / few)


class Block(nn.Module):
    """A layer that keeps as much for its backward as a transformer's: sixteen times its output.

    (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
    equation 1.) A micro-batch's output has 256 KiB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        wide = torch.cat([x] * 4, -1)
        for _ in range(4):
            wide = torch.tanh(wide * self.scale)
        return x + wide[..., :WIDTH]


def plan_for(layers: int, schedule: str, micro_batches: int) -> Plan:
    """Stages of about equally many layers on two devices."""
    style = FAMILIES[schedule].placement
    placement = placement_of_style(style, 2, 2 if style in ("looped", "folded") else 1)
    bounds = [layers * n // len(placement) for n in range(len(placement) + 1)]
    stages = tuple(
        Stage(range(lo, hi), (device,), (ROWS,))
        for device, (lo, hi) in zip(placement, pairwise(bounds), strict=True)
    )
    return Plan(stages, micro_batches, ROWS, schedule)


def rows_of(schedules: Sequence[str]) -> list[Row]:
    """What a rank finds; every rank runs this."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    whole = tuple(torch.randn(2, MANY * ROWS, LENGTH, WIDTH))
    graph = capture_model(model, tuple(part[:ROWS] for part in whole), loss=nn.functional.mse_loss)
    profile = measure_profile(graph, whole, batch_sizes=(1, ROWS), repeats=1)
    pair = Cluster("pair", (Host("here", (Device("cpu", 1e12),) * 2, inf),))
    optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    found: list[Row] = []
    for schedule in schedules:
        plans = [plan_for(len(graph.layer_names), schedule, count) for count in (FEW, MANY)]
        predicted = [
            simulate_plan(
                plan, profile, pair, optimizer_bytes_per_parameter_byte=1.0
            ).peak_memory_bytes[dist.get_rank()]
            for plan in plans
        ]
        for transport in TRANSPORTS:
            measured: list[float] = []
            for plan in plans:
                batch = tuple(part[: plan.global_batch] for part in whole)
                safety = Safety(transport=transport)
                with Pipeline(
                    graph, plan, batch, optimizer=optimizer, verify="off", safety=safety
                ) as pipe:
                    pipe.step(batch)
                    with pipe.measuring_memory() as memory:
                        pipe.step(batch)
                    measured.append(memory.peak_bytes)
                    pipe.close(gather=True)
            few_many = (measured[0], measured[1])
            row = Row(schedule, transport, dist.get_rank(), (predicted[0], predicted[1]), few_many)
            found.append(row)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("schedules", nargs="*", default=list(FAMILIES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    by_rank = launch_workers(rows_of, (arguments.schedules,), workers=2, threads=1)
    rows = [row for case in zip(*by_rank, strict=True) for row in case]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(
            "schedule                transport       rank  predicted       measured        excess"
        )
        for row in rows:
            (few, many), (least, most) = row.predicted, row.measured
            print(
                f"{row.schedule:23} {row.transport:15} {row.rank:4}"
                f"{few / 2**20:7.2f} {many / 2**20:7.2f} {least / 2**20:7.2f} {most / 2**20:7.2f}"
                f" {row.excess:7.3f}"
            )
    if any(row.excess > ALLOWED for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
