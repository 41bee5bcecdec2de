"""What forwards and backwards of each task's stages take here, for SpecTrain's leads.

    python benchmarks/convergence/measured_leads.py

It measures every cut of a task that the convergence study trains, on one thread, and writes the
median of several profiles, with the load of the machine, to ``measured_leads.json``.
"""

import json
import os
import platform
from statistics import median
from time import strftime
from typing import Any

import torch
from runs import MEASURED, Asked, leads_of
from tasks import TASKS, stages_of

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.measure.layer_times import measure_profile

CUTS = (
    ("digits-dense", 4),
    ("digits-dense", 8),
    ("digits-convolution", 4),
    ("text-lstm", 4),
    ("text-transformer", 4),
)
PROFILES = 7


def stage_seconds(name: str, stages: int) -> tuple[list[float], list[float]]:
    """Seconds of a forward and of a backward of every stage with the task's batch."""
    task = TASKS[name]
    batch = next(task.train(0, task.batch_size))
    graph = capture_model(Chain(stages_of(task, stages, 0), loss=task.loss), batch)
    layers = measure_profile(graph, batch, batch_sizes=(task.batch_size,), repeats=9).layers
    # The loss is a layer of its own, on the last stage.
    runs = [layers[k : k + 1] for k in range(stages - 1)] + [layers[stages - 1 :]]
    rows = task.batch_size
    forward_s = [sum(layer.forward_s.at(rows) for layer in run) for run in runs]
    return forward_s, [sum(layer.backward_s.at(rows) for layer in run) for run in runs]


def median_seconds(name: str, stages: int) -> dict[str, Any]:
    """Stage by stage, of several profiles."""
    profiles = [stage_seconds(name, stages) for _ in range(PROFILES)]
    forward_s, backward_s = (
        [median(values) for values in zip(*(found[kind] for found in profiles), strict=True)]
        for kind in (0, 1)
    )
    return {"forward_s": forward_s, "backward_s": backward_s}


def main() -> None:
    """Measure all tasks, and say what leads come of it."""
    torch.set_num_threads(1)
    tasks = {f"{name}/{stages}": median_seconds(name, stages) for name, stages in CUTS}
    document = {
        "date": strftime("%Y-%m-%d %H:%M"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "tasks": tasks,
    }
    MEASURED.write_text(json.dumps(document, indent=1) + "\n")
    for name, stages in CUTS:
        print(name, leads_of(Asked(name, "sgd", "spectrain-measured", stages, 0.0, 0, 0)))


if __name__ == "__main__":
    main()
