"""Published runs as plans of tensor groups, and what the simulator says about them."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from decoder import Decoder, decoder_profile

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.sharding import with_sharding
from penstock.measure.hardware import HARDWARE
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import MEMORY_RESERVE, PlanningProblem
from penstock.planners.tensor_groups import on_groups, without_groups
from penstock.simulate.simulation import Prediction, simulate_plan

PUBLISHED = Path(__file__).parent / "published.toml"
GPUS_OF_HOST = 8

LINKS = {"A100-80GB": (200e9, 25e9), "H100-80GB": (450e9, 50e9)}
"""Bytes per second in each direction of a GPU: what an all-reduce reaches over NVLink inside its
host, and its own port (200 and 400 Gb/s) outside. On the A100 NVLink's 300 GB/s are not reached
(NVIDIA/nccl-tests, issue 149: 200); on the H100, whose switches add, they are (480 of 450 in the
sample of nccl/README.md of NVIDIA/dgxc-benchmarking, commit 46e4201). Ports: the papers."""

NVLINK_S, PORT_S = 2e-6, 5e-6
"""Latencies, as in the clusters of the package."""

FUSED_SHARES = {"H100-80GB": 0.83}
"""Sustained shares with the kernels of Transformer Engine, set by the first run of nemotron-15b."""

OPTIMIZER_BYTES = 7.0
"""Bytes for each byte of the parameters, beside a gradient as large: a gradient of four bytes, a
copy of the parameter and two moments take 18 bytes a parameter together."""


@dataclass(frozen=True)
class PublishedRun:
    """A row of `published.toml`; ``seconds`` are 0 where the GPUs ran out of memory."""

    source: str
    group: str
    name: str
    shape: Decoder
    schedule: str
    device: str
    overlaps: bool
    sharded: bool
    fused: bool
    gradient_bytes: float
    sets: str
    port: float
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
    plan = ("gpus", "tensor", "pipeline", "micro_batch", "batch")
    for source, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for given in table["rows"]:
            columns = table.get("columns", ())
            row = given if not columns else dict(zip(columns, given, strict=True))
            shape = Decoder(**{k: v for k, v in (table["model"] | row).items() if k in names})
            chunks = row.get("chunks", 1)
            yield PublishedRun(
                source=source,
                group=row.get("group", ""),
                name=row.get("name", f"{shape.parameters / 1e9:.0f}B"),
                shape=shape,
                schedule=table.get("schedule", "interleaved" if chunks > 1 else "1f1b"),
                device=table["device"],
                overlaps=table["overlaps"],
                sharded=table.get("sharded", False),
                fused=table.get("fused", False),
                gradient_bytes=row.get("gradient_bytes", 2),
                sets=table.get("sets", ""),
                port=table.get("port", LINKS[table["device"]][1]),
                chunks=chunks,
                seconds=seconds_of(row, shape, table["device"]),
                **{key: row[key] for key in plan},
            )


def seconds_of(row: dict[str, Any], shape: Decoder, device: str) -> float:
    """The published seconds of an iteration; from operations where the paper gives these."""
    if "seconds" in row:
        return row["seconds"]
    if "tokens_per_s" in row:
        return shape.words * row["batch"] / row["gpus"] / row["tokens_per_s"]
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
    link, _ = LINKS[run.device]
    device = Device(
        run.device,
        HARDWARE[run.device].memory_bytes,
        overlaps_communication=run.overlaps,
    )
    count = min(GPUS_OF_HOST, run.gpus)
    host = Host("", (device,) * count, link, count * run.port, NVLINK_S, PORT_S)
    hosts = tuple(replace(host, name=f"host {i}") for i in range(run.gpus // count))
    return Cluster(f"{run.gpus} {run.device}", hosts)


def plan_of(run: PublishedRun) -> Plan:
    """The published plan: blocks in equal chunks, replicas of a stage on neighbouring groups."""
    stages, replicas = run.pipeline * run.chunks, run.replicas
    blocks = -(-run.shape.layers // stages)
    # Where two blocks are missing, the first and the last chunk have one less; else the last has.
    less = blocks * stages - run.shape.layers == 2
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
    hardware = replace(HARDWARE[run.device], sustained_share=sustained or usual_share(run))
    return PlanningProblem(
        decoder_profile(run.shape, run.tensor, run.device, hardware, run.micro_batch),
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
        with_sharding(plan, "optimizer") if run.sharded else plan,
        problem.profile,
        problem.cluster,
        optimizer_bytes_per_parameter_byte=OPTIMIZER_BYTES,
        with_timeline=False,
    )


def fits(run: PublishedRun, prediction: Prediction) -> bool:
    """Return whether every GPU has room, with the share of memory free that planners leave."""
    # Sums in four bytes lie beside the gradient of two, and are not divided.
    sums = (run.gradient_bytes - 2) * run.shape.parameters / (run.tensor * run.pipeline)
    room = (1 - MEMORY_RESERVE) * HARDWARE[run.device].memory_bytes
    return max(prediction.peak_memory_bytes) + sums <= room


def usual_share(run: PublishedRun) -> float:
    """The share that was set for the device of a run, and for its kernels."""
    share = HARDWARE[run.device].sustained_share
    return FUSED_SHARES.get(run.device, share) if run.fused else share


def fitted_share(run: PublishedRun) -> float:
    """The sustained share with which the prediction of a run is its published time.

    Compute takes as long as the inverse of the share, and messages take the same time with any. So
    two predictions give the share, as long as messages are hidden or not hidden with both.
    """
    usual = usual_share(run)
    low, high = (predicted(run, share).iteration_s for share in (usual, 1.1 * usual))
    slope = (low - high) / (1 / usual - 1 / (1.1 * usual))
    return 1 / (1 / usual + (run.seconds - low) / slope)
