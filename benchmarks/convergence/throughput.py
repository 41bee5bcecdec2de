"""What not flushing gains in throughput, simulated: SpecTrain's four devices, links of every speed.

    python benchmarks/convergence/throughput.py [--out throughput.json]

Three weight-heavy models of the kinds that SpecTrain (arXiv 1809.02839, section 4) reports: dense
self-normalising layers, a Transformer, a residual LSTM; 128 samples an update, as there. A device
is one NVIDIA P40 by its data sheet (12 TFLOP/s, 346 GB/s); a layer takes what its multiplications
or its reading of the weights take, whichever is longer. Against data parallelism on all devices
stand the best synchronous plan of any schedule, and the best of three asynchronous pipelines (four
stages, two stages, two stages of two replicas), per update.

Profiles are affine in the samples, and the longer of two costs is not. So a plan is searched for at
each micro-batch size with a line that is exact at that size and at a quarter of it; and every plan
is judged by what its own stages take with their own rows, exactly.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.ask_planner import plan_pipeline
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import Infeasible
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import Prediction, simulate_plan

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

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
ASYNCHRONOUS = ("vanilla", "pipedream", "spectrain")


@dataclass(frozen=True, slots=True)
class Model:
    """``layers`` equal layers of ``parameters`` weights, each used ``positions`` times a sample."""

    name: str
    layers: int
    parameters: int
    positions: int
    width: int

    def pass_s(self, samples: float) -> float:
        """Seconds of a forward, or of half a backward, of one layer."""
        reading_s = 4 * self.parameters / MEMORY_BYTES_PER_S
        return max(reading_s, 2 * self.parameters * self.positions * samples / FLOPS_PER_S)

    def near(self, samples: int) -> ModelProfile:
        """Its costs on one device, exact with ``samples`` and with a quarter of them."""
        most_s, quarter_s = self.pass_s(samples), self.pass_s(samples / 4)
        slope_s = (most_s - quarter_s) / (0.75 * samples)
        return self.profile([Affine(most_s - slope_s * samples, slope_s)] * self.layers)

    def of(self, plan: Plan) -> ModelProfile:
        """Its costs with the rows that each stage of ``plan`` has, exactly."""
        rows = [max(stage.slices) for stage in plan.stages for _ in stage.layers]
        return self.profile([Affine(self.pass_s(count)) for count in rows])

    def profile(self, passes_s: Sequence[Affine]) -> ModelProfile:
        """The model, where a pass of each layer takes so long."""
        crossing = Affine(per_sample=4.0 * self.width * self.positions)
        layers = tuple(
            LayerCost(
                f"layer {number}",
                pass_s,
                pass_s,
                pass_s,
                parameter_bytes=4 * self.parameters,
                saved_bytes=crossing,
            )
            for number, pass_s in enumerate(passes_s)
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


def data_parallel(layers: int) -> Plan:
    """The whole model on every device, as SpecTrain's comparison has it."""
    shares = (BATCH // DEVICES,) * DEVICES
    return Plan((Stage(range(layers), tuple(range(DEVICES)), shares),), 1, BATCH, "1f1b")


def asynchronous(layers: int, schedule: str, stages: int, replicas: int) -> Plan:
    """Equal stages; every micro-batch is a whole batch with an update of its own."""
    each = layers // stages
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
    cluster = cluster_with(link_gb_per_s)
    options = {"optimizer_bytes_per_parameter_byte": 1.0}

    def judged(plan: Plan, **more: Any) -> Prediction:
        return simulate_plan(plan, model.of(plan), cluster, **options, **more)

    row: dict[str, Any] = {"model": model.name, "link_gb_per_s": link_gb_per_s}
    plain = data_parallel(model.layers)
    row["data_parallel_s"] = judged(plain).iteration_s
    plans = [plain]
    for samples in SIZES:
        near = model.near(samples)
        with suppress(Infeasible):
            plans.append(plan_pipeline(near, cluster, BATCH, micro_batch_size=samples, **options))
    seconds = {index: judged(plan).iteration_s for index, plan in enumerate(plans)}
    best = plans[min(seconds, key=lambda index: seconds[index])]
    row["synchronous_s"] = min(seconds.values())
    row["synchronous"] = (
        f"{best.schedule}, {len(best.stages)} stage(s), {best.micro_batches} micro-batches"
    )
    for schedule in ASYNCHRONOUS:
        tried = {
            shape: judged(asynchronous(model.layers, schedule, *shape), iterations=2).steady_s
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
