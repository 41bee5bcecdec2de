"""What a profile of each kind of GPU would gain over one profile and a speed.

Two hosts have four GPUs of one kind each. Profiles of both kinds are estimated, so nothing but the
shape of the model decides. The usual plan has the first kind's profile, and the second kind's
speed, the median over layers. It is simulated with the times that both profiles say, and so is
every plan that knows both: those of `search` for each order of the kinds and each of some cuts
between them, and what they become when layers move between neighbouring stages as long as that
helps. A gain is how much longer the usual plan takes than the best of these.

    python benchmarks/planning/unequal_kinds.py     16 cases, about five minutes on two cores
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock import capture_model, estimate_profile, simulate_plan
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.measure.workers import layer_speeds, middle
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planning.answers import TimeLimit, find_plan
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.score import make_score

WIDTH, WORDS = 1024, 32_000
GPUS = 4
"""Of each kind; those of the second have the higher numbers."""

PAIRS = (("A100-80GB", "RTX-4090"), ("H100-80GB", "A100-80GB"))
MEMORY = {"A100-80GB": 80e9, "H100-80GB": 80e9, "RTX-4090": 24e9}
LINKS = {"A100-80GB": 300e9, "H100-80GB": 450e9, "RTX-4090": 20e9}

CUTS = 4
LIMIT_S = 1.0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, words, _ = x.shape
        q, k, v = self.all(self.norm(x)).view(rows, words, 3, 16, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, times * WIDTH)
        self.down = nn.Linear(times * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gates(nn.Module):
    """Moves much and multiplies little."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = x + torch.tanh(norm(x)) * torch.sigmoid(x)
        return x


def decoder(*blocks: nn.Module, length: int) -> tuple[nn.Module, Any, tuple[int, int]]:
    """A model of words, a batch of it, and the micro-batch and batch size."""
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS), nn.Flatten(0, 1))
    words = torch.zeros(4, length, dtype=torch.long, device="cpu")
    return (
        nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, head),
        (words, words.flatten()),
        (2, 64),
    )


def gpt() -> Any:
    return decoder(*(m for _ in range(12) for m in (Attention(), FeedForward(4))), length=1024)


def long_attention() -> Any:
    attention, wide = (Attention() for _ in range(10)), (FeedForward(12) for _ in range(10))
    return decoder(*attention, *wide, length=8192)


def gates() -> Any:
    return decoder(*(Gates() for _ in range(8)), *(FeedForward(8) for _ in range(8)), length=1024)


def convolutions() -> Any:
    widths, layers, before = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512), [], 3
    for place, width in enumerate(widths):
        pool = nn.MaxPool2d(2) if place in (1, 3, 6, 9) else nn.Identity()
        layers.append(nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), pool))
        before = width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))
    images = torch.zeros(32, 3, 224, 224, device="cpu")
    batch = images, torch.zeros(32, dtype=torch.long, device="cpu")
    return nn.Sequential(*layers, head), batch, (16, 256)


def seconds(profile: ModelProfile, layers: range, rows: int) -> float:
    return profile.forward_s(layers, rows) + profile.backward_s(layers, rows)


def with_times_of(
    first: ModelProfile, second: ModelProfile, layers: range, speed: float
) -> ModelProfile:
    """The first profile; ``layers`` have the second kind's own times on a device of ``speed``."""
    halves = ("forward_s", "backward_input_s", "backward_weight_s")
    changed = list(first.layers)
    for i in layers:
        own = {name: getattr(second.layers[i], name).scaled(speed) for name in halves}
        changed[i] = replace(changed[i], **own)
    return replace(first, layers=tuple(changed))


def iteration_s(plan: Plan, profiles: tuple[ModelProfile, ModelProfile], cluster: Cluster) -> float:
    """The plan simulated with the times of both profiles; infinite if it does not fit.

    A stage with GPUs of both kinds keeps the first kind's times; the others get their speed in it.
    """
    (first, second), speeds = profiles, [device.speed for device in cluster.devices]
    profile, nominal = first, speeds[GPUS]
    for stage in plan.stages:
        if min(stage.devices) >= GPUS:
            profile = with_times_of(profile, second, stage.layers, nominal)
            continue
        for device, rows in zip(stage.devices, stage.slices, strict=True):
            if device >= GPUS:
                own_s = seconds(second, stage.layers, rows)
                speeds[device] = seconds(first, stage.layers, rows) / own_s
    own = iter(speeds)
    hosts = tuple(
        replace(host, devices=tuple(replace(device, speed=next(own)) for device in host.devices))
        for host in cluster.hosts
    )
    found = simulate_plan(plan, profile, replace(cluster, hosts=hosts), with_timeline=False)
    return found.iteration_s if found.fits else float("inf")


def climbed(plan: Plan, score: Callable[[Plan], float]) -> float:
    """The score after moving up to three layers over a cut at a time, as long as that helps."""
    best_s, better = score(plan), True
    while better:
        better = False
        for neighbour in neighbours(plan):
            found_s = score(neighbour)
            if found_s < best_s * (1 - 1e-9):
                plan, best_s, better = neighbour, found_s, True
                break
    return best_s


def neighbours(plan: Plan) -> Iterator[Plan]:
    for place, moved in product(range(len(plan.stages) - 1), (-1, 1, -2, 2, -3, 3)):
        left, right = plan.stages[place : place + 2]
        cut = left.layers.stop + moved
        if left.layers.start < cut < right.layers.stop:
            pair = (
                replace(left, layers=range(left.layers.start, cut)),
                replace(right, layers=range(cut, right.layers.stop)),
            )
            stages = (*plan.stages[:place], *pair, *plan.stages[place + 2 :])
            yield replace(plan, stages=stages)


def gain(build: Callable[[], Any], autocast: torch.dtype | None, kinds: tuple[str, str]) -> float:
    """Plan with one profile and with both; prints a row."""
    with torch.device("meta"):
        model, batch, (size, global_batch) = build()
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    sizes = (size // 2, size, 2 * size)
    first, second = (
        estimate_profile(graph, batch, kind, batch_sizes=sizes, autocast=autocast) for kind in kinds
    )
    of_layers = layer_speeds(first, second)
    speed = middle(of_layers, 0.5)
    hosts = tuple(
        Host(kind, (Device(kind, MEMORY[kind], speed=own),) * GPUS, LINKS[kind], 12.5e9, 5e-6, 2e-5)
        for kind, own in zip(kinds, (1.0, speed), strict=True)
    )
    cluster, layers = Cluster("two kinds", hosts), len(first.layers)

    def planned(profile: ModelProfile) -> Plan:
        problem = PlanningProblem(profile, cluster, global_batch, sizes)
        limit = TimeLimit(LIMIT_S, time.perf_counter)
        return find_plan(problem, "search", make_score(problem), limit=limit)

    def score(plan: Plan) -> float:
        return iteration_s(plan, (first, second), cluster)

    usual = planned(first)
    usual_s = score(usual)
    found = [climbed(usual, score)]
    for cut in range(2, layers - 1, max(1, layers // CUTS)):
        for own in (range(cut), range(cut, layers)):
            found.append(climbed(planned(with_times_of(first, second, own, speed)), score))
    slowest, fastest = (middle(of_layers, share) for share in (0.1, 0.9))
    name = f"{build.__name__}, {'bfloat16' if autocast else 'float32'}"
    moved, known = (100 * (usual_s / least_s - 1) for least_s in (found[0], min(found)))
    print(
        f"| {name} | {' and '.join(kinds)} | {slowest:.2f} to {fastest:.2f} "
        f"| {1e3 * usual_s:.0f} ms | {moved:.1f} % | {known:.1f} % |",
        flush=True,
    )
    return usual_s / min(found) - 1


if __name__ == "__main__":
    types = (None, torch.bfloat16)
    cases = product((gpt, long_attention, gates, convolutions), types, PAIRS)
    gains = [gain(*case) for case in cases]
    print(f"median of {len(gains)}: {100 * median(gains):.1f} %; largest {100 * max(gains):.1f} %")
