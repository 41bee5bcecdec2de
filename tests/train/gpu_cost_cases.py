"""What worker processes measure on stand-in GPUs."""

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import stand_in_gpu
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.measure import clock, links
from penstock.measure.layer_times import measure_profile
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.processes.world import join_world
from penstock.train import live_cluster, profile_job
from penstock.train.job import Job
from penstock.train.live_cluster import LiveCluster, measure_cluster
from penstock.train.profile_job import cost_job

KINDS = ("H100", "H100", "T4")
SECONDS_OF_A_SAMPLE = {"H100": 100.0, "T4": 400.0}
FULL_BYTES, HELD_BYTES = 80 << 30, 20 << 30


class Later:
    """The machine's clock, which layers put forward by what they would take."""

    ahead_s = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return time.perf_counter() + cls.ahead_s


class Slow(torch.autograd.Function):
    """Takes a minute or more a sample, which no load of this machine comes near."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        Later.ahead_s += SECONDS_OF_A_SAMPLE[torch.cuda.get_device_properties(x.device).name] * len(
            x
        )
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SlowLayer(nn.Linear):
    """A layer whose time is known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(super().forward(x))  # type: ignore[return-value]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), SlowLayer(8, 8), nn.Linear(8, 4))


def batches(*_: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(4, 8), torch.arange(4)


JOB = Job("unequal", model, batches, functional.cross_entropy, batch_size=4, micro_batch_sizes=(2,))


def with_gpus(devices: int) -> None:
    """Stand-ins of unequal kinds, each with memory that another process holds."""
    stand_in_gpu.install(
        devices, names=KINDS, memory_bytes=FULL_BYTES, held_bytes=HELD_BYTES, first_use_s=120.0
    )
    clock_of_layers = SimpleNamespace(**{**vars(time), "perf_counter": Later.perf_counter})
    stand_in_gpu.time = clock.time = clock_of_layers  # type: ignore[assignment]
    links.GPU_SIZES_BYTES = (4_096, 65_536, 1_048_576)  # type: ignore[assignment]
    links.ROUND_TRIPS = profile_job.REPEATS = 1
    clock.WARM_UP_SIDE = 64


def costed(gpus: int) -> PlanningProblem | None:
    """Costs of a job on ranks that have or share this number of GPUs."""
    with_gpus(gpus)
    world = join_world("cuda", 120.0)
    try:
        return cost_job(world, JOB, "cuda")
    finally:
        world.leave()


def cluster_measured() -> LiveCluster:
    """What 'penstock cluster' measures on a GPU for each rank."""
    with_gpus(int(os.environ["WORLD_SIZE"]))
    live_cluster.GPU_SIDE = 64
    return measure_cluster("cuda", torch.bfloat16)


def profile_of_another_gpu() -> tuple[ModelProfile, int, list[str]]:
    """A profile of a GPU that is not the current one; bytes used on that; what the host read."""
    with_gpus(3)
    example = next(batches())
    graph = capture_model(model(), example, loss=functional.cross_entropy)
    found = measure_profile(graph, example, batch_sizes=(2, 4), repeats=2, device="cuda:2")
    reads = {wait.why for wait in stand_in_gpu.waits() if wait.within("time_once")}
    return found, torch.cuda.max_memory_allocated(0), sorted(reads)
