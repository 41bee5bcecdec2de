"""Two replicas of a small ResNet on a rank each: what costs what, in CPU seconds."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import distributed
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.examples.resnet_digits import ResNet
from penstock.measure.layer_times import measure_profile
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.pipeline import Pipeline

ROWS, MICRO_BATCHES = 24, 4
STEPS, SUMS = 9, 40


def two_replicas(layers: int) -> Plan:
    """Each has the whole model, and half of the rows of each micro-batch."""
    return Plan((Stage(range(layers), (0, 1), (ROWS, ROWS)),), MICRO_BATCHES, 2 * ROWS, "1f1b")


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this thread: those of Gloo wake up for as long as another rank is late."""
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


def costs_and_steps() -> tuple[list[tuple[ModelProfile, float]], float]:
    """Before and after some steps, the profile and seconds of a small all-reduce; and of a step.

    Other work on the machine slows down what shares caches with it, now more, now less.
    """
    torch.manual_seed(0)
    rows = 2 * ROWS * MICRO_BATCHES
    batch = torch.randn(rows, 1, 8, 8), torch.randint(10, (rows,))
    model = ResNet((16, 32, 64), 1)
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    plan, table = two_replicas(len(graph.layer_names)), torch.zeros(64)

    def costs() -> tuple[ModelProfile, float]:
        sizes = (ROWS // 2, ROWS)
        profile = measure_profile(graph, batch, batch_sizes=sizes)
        sums_s: list[float] = []
        for _ in range(SUMS):
            # As in a step, where a rank computes between two sums.
            model(batch[0][:ROWS])
            sums_s.append(cpu_s(lambda: distributed.all_reduce(table)))
        return profile, median(sums_s)

    with Pipeline(
        graph, batch, plan=plan, optimizer=lambda of: torch.optim.SGD(of, lr=0.01), verify="off"
    ) as pipeline:
        pipeline.step(batch)
        before = costs()
        step_s = median(cpu_s(lambda: pipeline.step(batch)) for _ in range(STEPS))
        return [before, costs()], step_s
