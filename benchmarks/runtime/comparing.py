"""Iterations of both runtimes, one after the other in the same processes, against their ideals."""

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import sub, truediv
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, Case, bounds_of
from contenders import Ours, Rival, action_seconds
from ideal import Seconds, ideal_s, work_bound_s
from models import Model, make_model

from penstock.runtime.transport.transport import TransportChoice
from penstock.schedule.action import Action

LIMIT_S = 100e-6
WARM_UP = 3
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Comparison:
    """One schedule on one model; the rival's figures are ``None`` where it has no such schedule.

    All are medians over the rounds. ``ideal_s`` is the makespan of the order with action times as
    measured right after each round; ``overhead_s`` is an iteration beyond it, over ``actions``, the
    compute actions of the busiest rank (of a core, where ranks share cores); ``efficiency`` the
    ideal over the iteration. ``between_efficiency`` is that with the times that the actions had in
    the iteration itself, so it shows only what happens between them.
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
    efficiency: float
    between_efficiency: float
    rival_s: float | None = None
    rival_ideal_s: float | None = None
    rival_overhead_s: float | None = None
    rival_efficiency: float | None = None
    iteration_ratio: float | None = None

    @property
    def limit_ratio(self) -> float:
        """Our overhead over the limit."""
        return self.overhead_s / LIMIT_S

    @property
    def overhead_ratio(self) -> float | None:
        """Our overhead over the rival's."""
        return self.overhead_s / self.rival_overhead_s if self.rival_overhead_s else None

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        ratios = {"overhead_ratio": self.overhead_ratio, "limit_ratio": self.limit_ratio}
        return {**asdict(self), **ratios}


@dataclass
class Round:
    """One iteration of each contender, and what actions took by themselves right after."""

    taken_s: list[float]
    recorded_s: dict[Action, float]
    seconds: dict[int, dict[str, float]]


def compare(
    name: str,
    model_name: str,
    micro_batches: int,
    rounds: int,
    repeats: int,
    blocks: int = 8,
    transport: TransportChoice = "auto",
) -> dict[str, Any]:
    """Alternate iterations of both; every rank calls. ``repeats`` are for the action times.

    ``transport`` carries our messages; the rival's always go through Gloo.
    """
    case, ranks = CASES[name], dist.get_world_size()
    model = make_model(model_name, blocks)
    bounds = bounds_of(case, model_name, len(model.blocks), ranks)
    # Weights of its own: the rival drops the gradients of its parameters before every iteration.
    ours = Ours(case, make_model(model_name, blocks), bounds, micro_batches, transport)
    rival = Rival(case, model, bounds, micro_batches) if case.rival else None
    contenders = [ours, rival] if rival is not None else [ours]
    batch = model.batch(micro_batches)
    holders = first_ranks(ours.orders, len(bounds))
    own = [stage for stage, holder in enumerate(holders) if holder == dist.get_rank()]
    found: list[Round] = []
    for number in range(WARM_UP + rounds):
        taken: list[float] = []
        for contender in contenders:
            contender.prepare()
            taken.append(timed(lambda contender=contender: contender.step(batch)))
        if number >= WARM_UP:
            recorded = ours.recorded_s()
            dist.barrier()
            found.append(Round(taken, recorded, stage_seconds(model, bounds, own, repeats)))
    ours.close()
    gc.collect()
    made = summary(case, model_name, micro_batches, ours, rival, found)
    return made.to_json() | {"transport": transport}


def stage_seconds(
    model: Model, bounds: list[range], own: Sequence[int], repeats: int
) -> dict[int, dict[str, float]]:
    """Seconds by kind of every stage, those in ``own`` measured here; every rank calls."""
    medians = {
        stage: {
            kind: median(values)
            for kind, values in action_seconds(model, bounds, stage, repeats).items()
        }
        for stage in own
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, medians)
    return {stage: kinds for part in gathered for stage, kinds in part.items()}


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
    ours: Ours,
    rival: Rival | None,
    rounds: Sequence[Round],
) -> Comparison:
    """Medians over the rounds of times, ideals and overheads."""
    actions = actions_of_core(ours.orders)
    taken = [one.taken_s[0] for one in rounds]
    ideals = [bound_s(ours.orders, halved(one.seconds)) for one in rounds]
    between = [
        makespan_s(ours.orders, len(one.seconds), one.recorded_s.__getitem__) for one in rounds
    ]
    found = Comparison(
        case.name,
        model,
        len(ours.orders),
        micro_batches,
        len(rounds),
        actions,
        median(taken),
        median(ideals),
        median(map(sub, taken, ideals)) / actions,
        median(map(truediv, ideals, taken)),
        median(map(truediv, between, taken)),
    )
    if rival is None:
        return found
    orders = rival.orders or ours.orders
    others = [one.taken_s[1] for one in rounds]
    theirs = [bound_s(orders, one.seconds) for one in rounds]
    return replace(
        found,
        rival_s=median(others),
        rival_ideal_s=median(theirs),
        rival_overhead_s=median(map(sub, others, theirs)) / actions_of_core(orders),
        rival_efficiency=median(map(truediv, theirs, others)),
        iteration_ratio=median(map(truediv, taken, others)),
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


def halved(seconds: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Seconds by stage and kind, where the halves of a backward take as long as the whole."""
    return {stage: whole_split(stage, kinds) for stage, kinds in seconds.items()}


def bound_s(orders: Sequence[Sequence[Action]], seconds: dict[int, dict[str, float]]) -> float:
    """The makespan of ``orders``; where ranks share cores, at least their work over the cores."""
    return makespan_s(orders, len(seconds), lambda action: seconds[action.stage][action.kind])


def makespan_s(orders: Sequence[Sequence[Action]], stages: int, seconds: Seconds) -> float:
    """As `bound_s`, with seconds of each action."""
    return max(ideal_s(orders, stages, seconds), work_bound_s(orders, seconds, cores=CORES))


def timed(step: Callable[[], None]) -> float:
    """Seconds from the first rank's start to the last rank's end of ``step``."""
    dist.barrier()
    start = perf_counter()
    step()
    end = perf_counter()
    spans = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(spans, torch.tensor([start, end], dtype=torch.float64))
    return float(max(span[1] for span in spans) - min(span[0] for span in spans))
