"""Published runs as plans of tensor groups, and what the simulator says about them."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from decoder import Decoder, decoder_profile

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.measure.hardware import HARDWARE
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.sharding import with_sharding
from penstock.planning.tensor_groups import on_groups, without_groups
from penstock.simulate.simulation import Prediction, simulate_plan

PUBLISHED = Path(__file__).parent / "published.toml"
GPUS_OF_HOST = 8

LINKS = {"A100-80GB": (300e9, 25e9), "H100-80GB": (450e9, 50e9)}
"""Bytes per second in each direction of a GPU: NVLink inside its host, its own port (200 and 400
Gb/s) outside. Data sheets, and the papers."""

NVLINK_S, PORT_S = 2e-6, 5e-6
"""Latencies, as in the clusters of the package."""

OPTIMIZER_BYTES = 7.0
"""Bytes for each byte of the parameters, beside a gradient as large: a gradient of four bytes, a
copy of the parameter and two moments take 18 bytes a parameter together."""


@dataclass(frozen=True)
class PublishedRun:
    """A row of `published.toml`."""

    source: str
    name: str
    shape: Decoder
    schedule: str
    device: str
    overlaps: bool
    gpus: int
    tensor: int
    pipeline: int
    chunks: int
    micro_batch: int
    batch: int
    seconds: float

    @property
    def replicas(self) -> int:
        """Pipelines side by side."""
        return self.gpus // (self.tensor * self.pipeline)


def published_runs(path: Path = PUBLISHED) -> Iterator[PublishedRun]:
    """All rows, in order."""
    names = {field.name for field in fields(Decoder)}
    plan = ("name", "gpus", "tensor", "pipeline", "chunks", "micro_batch", "batch")
    for source, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for row in table["rows"]:
            shape = Decoder(**{k: v for k, v in (table["model"] | row).items() if k in names})
            yield PublishedRun(
                source=source,
                shape=shape,
                schedule=table.get("schedule", "interleaved" if row["chunks"] > 1 else "1f1b"),
                device=table["device"],
                overlaps=table["overlaps"],
                seconds=seconds_of(row, shape, table["device"]),
                **{key: row[key] for key in plan},
            )


def seconds_of(row: dict[str, Any], shape: Decoder, device: str) -> float:
    """The published seconds of an iteration; from operations where the paper gives these."""
    if "seconds" in row:
        return row["seconds"]
    if "gpu_hours" in row:
        hours = row["gpu_hours"] * shape.words * row["batch"] / 1e12
        return 3600 * hours / row["gpus"]
    operations = shape.model_operations * row["batch"]
    peak = HARDWARE[device].half_flops_per_s
    if "hardware_tflops" in row:
        # Equation 3: four forwards' worth of operations for each block, and three for the head.
        head = 6 * shape.words * shape.hidden * shape.vocabulary * row["batch"]
        operations = 4 / 3 * (operations - head) + head
    rate = 1e12 * row.get("hardware_tflops", row.get("model_tflops", 0.0))
    return operations / (row["gpus"] * (rate or row["operations_share"] * peak))


def cluster_of(run: PublishedRun) -> Cluster:
    """The GPUs of a run in hosts of eight."""
    link, port = LINKS[run.device]
    device = Device(
        run.device,
        HARDWARE[run.device].memory_bytes,
        overlaps_communication=run.overlaps,
    )
    count = min(GPUS_OF_HOST, run.gpus)
    host = Host("", (device,) * count, link, count * port, NVLINK_S, PORT_S)
    hosts = tuple(replace(host, name=f"host {i}") for i in range(run.gpus // count))
    return Cluster(f"{run.gpus} {run.device}", hosts)


def plan_of(run: PublishedRun) -> Plan:
    """The published plan: blocks in equal chunks, replicas of a stage on neighbouring groups."""
    stages, replicas = run.pipeline * run.chunks, run.replicas
    blocks = -(-run.shape.layers // stages)
    # Where two blocks are missing, the first and the last chunk have one less.
    less = (blocks * stages - run.shape.layers) // 2
    cuts = [0, *(1 + blocks * index - less for index in range(1, stages)), run.shape.layers + 2]
    return Plan(
        tuple(
            Stage(
                range(cuts[index], cuts[index + 1]),
                tuple(range(replicas * group, replicas * (group + 1))),
                (run.micro_batch,) * replicas,
            )
            for index in range(stages)
            for group in [index % run.pipeline]
        ),
        micro_batches=run.batch // (replicas * run.micro_batch),
        micro_batch_size=replicas * run.micro_batch,
        schedule=run.schedule,
        tensor_groups=tuple(
            tuple(range(run.tensor * group, run.tensor * (group + 1)))
            for group in range(run.gpus // run.tensor)
        ),
    )


def problem_of(run: PublishedRun, sustained: float = 0.0) -> PlanningProblem:
    """The question that the plan answers; ``sustained`` in place of the device's own share."""
    hardware = HARDWARE[run.device]
    if sustained:
        hardware = replace(hardware, sustained_share=sustained)
    return PlanningProblem(
        decoder_profile(run.shape, run.tensor, run.device, hardware),
        cluster_of(run),
        run.batch,
        (run.replicas * run.micro_batch,),
        OPTIMIZER_BYTES,
        recompute="off",
    )


def predicted(run: PublishedRun, sustained: float = 0.0) -> Prediction:
    """The published plan, simulated."""
    plan, problem = on_groups(plan_of(run), problem_of(run, sustained))
    plan = without_groups(plan)
    return simulate_plan(
        with_sharding(plan, "optimizer") if run.overlaps else plan,
        problem.profile,
        problem.cluster,
        optimizer_bytes_per_parameter_byte=OPTIMIZER_BYTES,
        with_timeline=False,
    )


def fitted_share(run: PublishedRun) -> float:
    """The sustained share with which the prediction of a run is its published time.

    Compute takes as long as the inverse of the share, and messages take the same time with any. So
    two predictions give the share, as long as messages are hidden or not hidden with both.
    """
    usual = HARDWARE[run.device].sustained_share
    low, high = (predicted(run, share).iteration_s for share in (usual, 1.1 * usual))
    slope = (low - high) / (1 / usual - 1 / (1.1 * usual))
    return 1 / (1 / usual + (run.seconds - low) / slope)
