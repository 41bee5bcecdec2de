"""Iterations of both runtimes, one after the other in the same processes, against their ideals."""

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, Case, bounds_of
from contenders import Ours, Rival, action_seconds
from ideal import ideal_s, work_bound_s
from models import make_model

from penstock.schedule.action import Action

__all__ = ["LIMIT_S", "Comparison", "compare"]

LIMIT_S = 100e-6
WARM_UP = 3
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Comparison:
    """One schedule on one model; the rival's figures are ``None`` where it has no such schedule.

    ``ideal_s`` is the makespan of the order with action times as measured in the same run;
    ``overhead_s`` is an iteration beyond it, over ``actions``, the compute actions of the busiest
    rank (of a core, where ranks share cores).
    """

    case: str
    model: str
    ranks: int
    micro_batches: int
    rounds: int
    actions: float
    ours_s: float
    ideal_s: float
    overhead_s: float
    rival_s: float | None = None
    rival_ideal_s: float | None = None
    rival_overhead_s: float | None = None
    iteration_ratio: float | None = None

    @property
    def limit_ratio(self) -> float:
        """Our overhead over the limit."""
        return self.overhead_s / LIMIT_S

    @property
    def overhead_ratio(self) -> float | None:
        """Our overhead over the rival's."""
        return self.overhead_s / self.rival_overhead_s if self.rival_overhead_s else None

    @property
    def efficiency(self) -> float:
        """The ideal over the iteration."""
        return self.ideal_s / self.ours_s

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        rival = None
        if self.rival_s is not None and self.rival_ideal_s is not None:
            rival = self.rival_ideal_s / self.rival_s
        return {
            **asdict(self),
            "efficiency": self.efficiency,
            "rival_efficiency": rival,
            "overhead_ratio": self.overhead_ratio,
            "limit_ratio": self.limit_ratio,
        }


def compare(
    name: str, model_name: str, micro_batches: int, rounds: int, repeats: int, blocks: int = 8
) -> dict[str, Any]:
    """Alternate iterations of both; every rank calls. ``repeats`` are for the action times."""
    case, ranks = CASES[name], dist.get_world_size()
    model = make_model(model_name, blocks)
    bounds = bounds_of(case, model_name, len(model.blocks), ranks)
    # Weights of its own: the rival drops the gradients of its parameters before every iteration.
    ours = Ours(case, make_model(model_name, blocks), bounds, micro_batches)
    rival = Rival(case, model, bounds, micro_batches) if case.rival else None
    contenders = [ours, rival] if rival is not None else [ours]
    batch = model.batch(micro_batches)
    own = [
        s
        for s, order_rank in enumerate(first_ranks(ours.orders, len(bounds)))
        if order_rank == dist.get_rank()
    ]
    samples: dict[int, dict[str, list[float]]] = {s: {k: [] for k in "FBIW"} for s in own}
    taken: list[list[float]] = [[] for _ in contenders]
    for number in range(WARM_UP + rounds):
        for contender, times in zip(contenders, taken, strict=True):
            contender.prepare()
            seconds = timed(lambda contender=contender: contender.step(batch))
            if number >= WARM_UP:
                times.append(seconds)
        if number >= WARM_UP and (number - WARM_UP) % max(1, rounds // 3) == 0:
            dist.barrier()
            for stage in own:
                for kind, values in action_seconds(model, bounds, stage, repeats).items():
                    samples[stage][kind] += values
    ours.close()
    gc.collect()
    medians = {s: {k: median(v) for k, v in kinds.items()} for s, kinds in samples.items()}
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, medians)
    seconds_of = {stage: kinds for part in gathered for stage, kinds in part.items()}
    found = summary(case, model_name, micro_batches, rounds, ours, rival, taken, seconds_of)
    return found.to_json()


def first_ranks(orders: Sequence[Sequence[Action]], stages: int) -> list[int]:
    """The first rank that works on each stage."""
    return [
        next(rank for rank, order in enumerate(orders) if any(a.stage == s for a in order))
        for s in range(stages)
    ]


def summary(
    case: Case,
    model: str,
    micro_batches: int,
    rounds: int,
    ours: Ours,
    rival: Rival | None,
    taken: list[list[float]],
    seconds: dict[int, dict[str, float]],
) -> Comparison:
    """Medians, ideals and overheads."""
    stages = len(seconds)
    actions = actions_of_core(ours.orders)
    plain = {stage: whole_split(stage, kinds) for stage, kinds in seconds.items()}
    best = bound_s(ours.orders, stages, plain)
    found = Comparison(
        case.name,
        model,
        len(ours.orders),
        micro_batches,
        rounds,
        actions,
        median(taken[0]),
        best,
        (median(taken[0]) - best) / actions,
    )
    if rival is None:
        return found
    orders = rival.orders or ours.orders
    theirs = bound_s(orders, stages, seconds)
    return Comparison(
        **{
            **asdict(found),
            "rival_s": median(taken[1]),
            "rival_ideal_s": theirs,
            "rival_overhead_s": (median(taken[1]) - theirs) / actions_of_core(orders),
            "iteration_ratio": median(a / b for a, b in zip(*taken, strict=True)),
        }
    )


def actions_of_core(orders: Sequence[Sequence[Action]]) -> float:
    """Compute actions of the busiest rank; of a core, where ranks share cores."""
    return max(max(map(len, orders)), sum(map(len, orders)) / CORES)


def whole_split(stage: int, seconds: dict[str, float]) -> dict[str, float]:
    """I and W as parts of B, as if splitting a backward cost nothing: what ours is held to.

    In proportion to the rival's halves; the first stage's, which it does not split, in halves.
    """
    both = seconds["I"] + seconds["W"]
    share = seconds["I"] / both if stage > 0 else 0.5
    whole = seconds["B"]
    return {**seconds, "I": share * whole, "W": (1 - share) * whole}


def bound_s(
    orders: Sequence[Sequence[Action]], stages: int, seconds: dict[int, dict[str, float]]
) -> float:
    """The makespan of ``orders``; where ranks share cores, at least their work over the cores."""
    flat = {(kind, stage): s for stage, kinds in seconds.items() for kind, s in kinds.items()}
    return max(ideal_s(orders, stages, flat), work_bound_s(orders, flat, cores=CORES))


def timed(step: Callable[[], None]) -> float:
    """Seconds from the first rank's start to the last rank's end of ``step``."""
    dist.barrier()
    start = perf_counter()
    step()
    end = perf_counter()
    spans = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(spans, torch.tensor([start, end], dtype=torch.float64))
    return float(max(span[1] for span in spans) - min(span[0] for span in spans))
