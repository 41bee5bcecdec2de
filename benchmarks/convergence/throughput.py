"""What not flushing gains in throughput, simulated: SpecTrain's four devices, links of every speed.

    python benchmarks/convergence/throughput.py [--out throughput.json]

Three weight-heavy models of the kinds that SpecTrain (arXiv 1809.02839, section 4) reports: dense
self-normalising layers, a Transformer, a residual LSTM; 128 samples an update, as there. A device
is one NVIDIA P40 by its data sheet (12 TFLOP/s, 346 GB/s); a layer takes what its multiplications
or its reading of the weights take, whichever is longer. Against data parallelism on all devices
stand the best synchronous plan of any schedule, and the best of three asynchronous pipelines (four
stages, two stages, two stages of two replicas), per update.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.ask_planner import plan_pipeline
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import Infeasible
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import simulate_plan

FLOPS_PER_S = 12e12
MEMORY_BYTES_PER_S = 346e9
MEMORY_BYTES = 24e9
DEVICES = 4
BATCH = 128
UPDATES = 32
LINKS_GB_PER_S = (12.0, 3.0, 1.25, 0.3)
LATENCY_S = 10e-6
OPTIMIZER_PASSES = 5
"""Momentum reads weight, gradient and momentum, and writes weight and momentum."""

SYNCHRONOUS = ("auto", "any")
ASYNCHRONOUS = ("vanilla", "pipedream", "spectrain")


@dataclass(frozen=True, slots=True)
class Model:
    """``layers`` equal layers of ``parameters`` weights, each used ``positions`` times a sample."""

    name: str
    layers: int
    parameters: int
    positions: int
    width: int

    def profile(self) -> ModelProfile:
        """Its costs on one device."""
        weight_bytes = 4 * self.parameters
        seconds = 2 * self.parameters * self.positions / FLOPS_PER_S
        reading_s = weight_bytes / MEMORY_BYTES_PER_S
        crossing = Affine(per_sample=4.0 * self.width * self.positions)
        pass_s = Affine(max(0.0, reading_s - seconds * BATCH), seconds)
        layers = tuple(
            LayerCost(
                f"layer {number}",
                pass_s,
                pass_s,
                pass_s,
                parameter_bytes=weight_bytes,
                saved_bytes=crossing,
            )
            for number in range(self.layers)
        )
        edges = tuple(
            Edge(at, at + 1, f"hidden {at}", crossing, crossing) for at in range(self.layers - 1)
        )
        step_s = OPTIMIZER_PASSES / MEMORY_BYTES_PER_S
        return ModelProfile(self.name, layers, edges, (), BATCH, step_s, "data sheet")


MODELS = (
    Model("dense 8 x 4096", 8, 4096**2, 1, 4096),
    Model("transformer 8 x 512", 8, 12 * 512**2, 16, 512),
    Model("residual LSTM 8 x 1024", 8, 8 * 1024**2, 16, 1024),
)


def cluster_with(link_gb_per_s: float) -> Cluster:
    """Four devices in one host."""
    devices = (Device("P40-24GB", MEMORY_BYTES),) * DEVICES
    return Cluster("four", (Host("host", devices, link_gb_per_s * 1e9, link_latency_s=LATENCY_S),))


def data_parallel(profile: ModelProfile) -> Plan:
    """The whole model on every device, as SpecTrain's comparison has it."""
    shares = (BATCH // DEVICES,) * DEVICES
    whole = Stage(range(len(profile.layers)), tuple(range(DEVICES)), shares)
    return Plan((whole,), 1, BATCH, "1f1b")


def asynchronous(profile: ModelProfile, schedule: str, stages: int, replicas: int) -> Plan:
    """Equal stages; every micro-batch is a whole batch with an update of its own."""
    each = len(profile.layers) // stages
    shares = (BATCH // replicas,) * replicas
    return Plan(
        tuple(
            Stage(
                range(each * k, each * (k + 1)),
                tuple(range(replicas * k, replicas * (k + 1))),
                shares,
            )
            for k in range(stages)
        ),
        UPDATES,
        BATCH,
        schedule,
    )


def row_of(model: Model, link_gb_per_s: float) -> dict[str, Any]:
    """Seconds an update: data parallelism, the best synchronous plan, asynchronous schedules."""
    profile, cluster = model.profile(), cluster_with(link_gb_per_s)
    options = {"optimizer_bytes_per_parameter_byte": 1.0}
    row: dict[str, Any] = {"model": model.name, "link_gb_per_s": link_gb_per_s}
    plain = simulate_plan(data_parallel(profile), profile, cluster, **options)
    row["data_parallel_s"] = plain.iteration_s
    best: tuple[float, str] | None = None
    for schedule in SYNCHRONOUS:
        try:
            plan = plan_pipeline(profile, cluster, BATCH, schedule=schedule, **options)
        except Infeasible:
            continue
        found_s = simulate_plan(plan, profile, cluster, **options).iteration_s
        words = f"{plan.schedule}, {len(plan.stages)} stage(s), {plan.micro_batches} micro-batches"
        best = min(best or (found_s, words), (found_s, words))
    assert best is not None
    row["synchronous_s"], row["synchronous"] = best
    for schedule in ASYNCHRONOUS:
        tried = {
            shape: simulate_plan(
                asynchronous(profile, schedule, *shape), profile, cluster, iterations=2, **options
            ).steady_s
            / UPDATES
            for shape in ((4, 1), (2, 2), (2, 1))
        }
        shape = min(tried, key=lambda shape: tried[shape])
        row[f"{schedule}_s"], row[f"{schedule}_stages_and_replicas"] = tried[shape], shape
    return row


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table of throughputs over data parallelism's."""
    lines = [
        "| model | links | data parallel, an update | best synchronous | is | `spectrain` "
        "| stages x replicas | over the best synchronous |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain_s, best_s = row["data_parallel_s"], row["synchronous_s"]
        async_s = row["spectrain_s"]
        shape = " x ".join(map(str, row["spectrain_stages_and_replicas"]))
        lines.append(
            f"| {row['model']} | {row['link_gb_per_s']:g} GB/s | {1e3 * plain_s:.1f} ms | "
            f"{plain_s / best_s:.2f}x | {row['synchronous']} | {plain_s / async_s:.2f}x | "
            f"{shape} | {best_s / async_s:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table; write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [row_of(model, link) for model in MODELS for link in LINKS_GB_PER_S]
    print(table_of(rows))
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
