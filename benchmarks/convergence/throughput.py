"""Throughput gained without flushes, simulated: SpecTrain's four devices, links of every speed.

    python benchmarks/convergence/throughput.py [--out throughput.json]

Three weight-heavy models of the kinds that SpecTrain (arXiv 1809.02839, section 4) reports: dense
self-normalising layers, a Transformer, a residual LSTM; 128 samples an update, as there. A device
is one NVIDIA P40 by its data sheet (12 TFLOP/s, 346 GB/s); a layer takes what its multiplications
or its reading of the weights take, whichever is longer. Against data parallelism on all devices
stand four stages without pipelining, GPipe on four stages, the best synchronous plan of any
schedule, and the best of three asynchronous pipelines (four stages, two stages, two stages of two
replicas), per update.

Profiles are affine in the samples, and the longer of two costs is not. So a plan is searched for at
each micro-batch size with a line that is exact at that size and at a quarter of it; and every plan
is judged by what its own stages take with their own rows, exactly.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.advice.plan_pipeline import plan_pipeline
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import Infeasible
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import Prediction, simulate_plan

RECORDED = Path(__file__).with_name("throughput.json")
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
SHAPES = ((4, 1), (2, 2), (2, 1))
"""Stages and replicas of each."""

BASELINES = ("data_parallel", "no_pipelining", "gpipe", "pipedream", "synchronous")
OPTIONS = {"optimizer_bytes_per_parameter_byte": 1.0}


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
        return ModelProfile(
            self.name,
            layers,
            edges,
            batch_size=BATCH,
            step_s_per_byte=step_s,
            source="data sheet",
        )


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


def equal_stages(layers: int, samples: int, stages: int, replicas: int = 1) -> tuple[Stage, ...]:
    """Stages of as many layers each, for micro-batches of ``samples``."""
    each = layers // stages
    shares = (samples // replicas,) * replicas
    return tuple(
        Stage(
            range(each * k, each * (k + 1)),
            tuple(range(replicas * k, replicas * (k + 1))),
            shares,
        )
        for k in range(stages)
    )


def in_gpipes_order(layers: int, micro_batches: int) -> Plan:
    """A stage on every device; with one micro-batch nothing is pipelined."""
    samples = BATCH // micro_batches
    stages = equal_stages(layers, samples, DEVICES)
    return Plan(stages, micro_batches, samples, "gpipe")


def asynchronous(layers: int, schedule: str, stages: int, replicas: int) -> Plan:
    """Equal stages; every micro-batch is a whole batch with an update of its own."""
    return Plan(equal_stages(layers, BATCH, stages, replicas), UPDATES, BATCH, schedule)


def judged(
    model: Model, plan: Plan, link_gb_per_s: float, options: Mapping[str, Any] = OPTIONS
) -> Prediction:
    """The simulated figures of a plan."""
    return simulate_plan(plan, model.of(plan), cluster_with(link_gb_per_s), **options)


def shapes_s(model: Model, schedule: str, link_gb_per_s: float) -> dict[tuple[int, int], float]:
    """Seconds an update in the steady state, by stages and replicas."""
    return {
        shape: judged(
            model,
            asynchronous(model.layers, schedule, *shape),
            link_gb_per_s,
            {**OPTIONS, "iterations": 2},
        ).steady_s
        / UPDATES
        for shape in SHAPES
    }


def one_by_one_s(model: Model, link_gb_per_s: float) -> dict[str, float]:
    """Seconds an update without pipelining, and by GPipe with the best number of micro-batches."""
    plans = [in_gpipes_order(model.layers, BATCH // samples) for samples in SIZES]
    seconds = {p.micro_batches: judged(model, p, link_gb_per_s).iteration_s for p in plans}
    return {"no_pipelining_s": seconds[1], "gpipe_s": min(seconds.values())}


def row_of(model: Model, link_gb_per_s: float) -> dict[str, Any]:
    """Seconds an update of all but the best synchronous plan."""
    row: dict[str, Any] = {"model": model.name, "link_gb_per_s": link_gb_per_s}
    row["data_parallel_s"] = judged(model, data_parallel(model.layers), link_gb_per_s).iteration_s
    row |= one_by_one_s(model, link_gb_per_s)
    for schedule in ASYNCHRONOUS:
        tried = shapes_s(model, schedule, link_gb_per_s)
        shape = min(tried, key=lambda shape: tried[shape])
        row[f"{schedule}_s"], row[f"{schedule}_stages_and_replicas"] = tried[shape], shape
    return row


def best_synchronous(model: Model, link_gb_per_s: float) -> dict[str, Any]:
    """The best synchronous plan that `search` finds, and its seconds an update."""
    plans = [data_parallel(model.layers)]
    for samples in SIZES:
        near, cluster = model.near(samples), cluster_with(link_gb_per_s)
        with suppress(Infeasible):
            plans.append(plan_pipeline(near, cluster, BATCH, micro_batch_size=samples, **OPTIONS))
    seconds = [judged(model, plan, link_gb_per_s).iteration_s for plan in plans]
    best = plans[seconds.index(min(seconds))]
    words = f"{best.schedule}, {len(best.stages)} stage(s), {best.micro_batches} micro-batches"
    return {"synchronous_s": min(seconds), "synchronous": words}


def table_of(rows: list[dict[str, Any]]) -> str:
    """Seconds of an update of `spectrain`, and its speed over that of each baseline."""
    lines = [
        "| model | links | `spectrain`, an update | stages x replicas | over data parallelism "
        "| over no pipelining | over GPipe | over `pipedream` | over the best synchronous | is |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own_s = row["spectrain_s"]
        shape = " x ".join(map(str, row["spectrain_stages_and_replicas"]))
        over = " | ".join(f"{row[f'{name}_s'] / own_s:.2f}x" for name in BASELINES)
        lines.append(
            f"| {row['model']} | {row['link_gb_per_s']:g} GB/s | {1e3 * own_s:.1f} ms | {shape} "
            f"| {over} | {row['synchronous']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table; write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--keep", action="store_true", help="the recorded synchronous plans, without a search"
    )
    arguments = parser.parse_args()
    models = {model.name: model for model in MODELS}
    if arguments.keep:
        rows = [
            row_of(models[kept["model"]], kept["link_gb_per_s"])
            | {name: kept[name] for name in ("synchronous_s", "synchronous")}
            for kept in json.loads(RECORDED.read_text())["rows"]
        ]
    else:
        cases = [(model, link) for model in MODELS for link in LINKS_GB_PER_S]
        rows = [row_of(*case) | best_synchronous(*case) for case in cases]
    print(table_of(rows))
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
