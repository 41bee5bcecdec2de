"""Plans under every synchronous schedule: which cases the matrix of the runtime consists of."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, pairwise, product
from typing import Any

from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.plan.row_split import split_rows
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PlacementStyle, StageCost, placement_of_style

SYNCHRONOUS = tuple(name for name in FAMILIES if FAMILIES[name].flushes)
MIRRORED = tuple(name for name in SYNCHRONOUS if FAMILIES[name].placement == "mirrored")

ONE_OF_EACH_KIND = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe-v")
"""Schedules for tests that are too slow for all; their slow tests have all."""

REPLICATIONS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (3,), (2,), (4,)),
    2: ((1, 1), (2, 1), (1, 3), (2, 2), (1, 2), (3, 1)),
    3: ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)),
    4: ((1, 1, 1, 1),),
}
"""Replicas of each device group, by the number of groups; up to four devices."""


FLAGS = ("recompute", "by_block", "in_turn", "costs", "turned", "autocast", "dropout")


@dataclass(frozen=True)
class Case:
    """One plan and how it is trained; ``rounds`` is the number of stages of a device group.

    ``micro_batch_rows`` are cut over replicas in proportions that change from stage to stage.
    With ``in_turn`` replicas take whole micro-batches in turn instead.
    ``costs`` says that the plan carries unequal costs, for orders that adapt to them; ``turned``
    that devices are numbered from the last group to the first. The pipeline learns ``haste`` times
    as fast as the one process, which must show unless it is 1. ``slot_bytes``: of shared memory,
    if fewer than usual.
    """

    schedule: str
    replicas: tuple[int, ...]
    micro_batches: int
    rounds: int = 1
    style: PlacementStyle = "straight"
    model: str = "deep"
    optimizer: str = "sgd"
    micro_batch_rows: int = 5
    recompute: bool = False
    by_block: bool = False
    in_turn: bool = False
    costs: bool = False
    turned: bool = False
    transport: str = "auto"
    autocast: bool = False
    dropout: bool = False
    haste: float = 1.0
    slot_bytes: int = 0

    def __str__(self) -> str:
        marks = [self.style, self.optimizer, self.transport]
        marks += [flag for flag in FLAGS if getattr(self, flag)]
        replicas = "-".join(map(str, self.replicas))
        return (
            f"{self.model}, {self.schedule}, replicas {replicas} x {self.rounds}, "
            f"{self.micro_batches} micro-batches, {', '.join(marks)}"
        )

    def plan(self, layers: int) -> Plan:
        """The case's plan for a model of ``layers`` layers."""
        groups = len(self.replicas)
        placement = placement_of_style(self.style, groups, self.rounds)
        ends = [layers * i // len(placement) for i in range(len(placement) + 1)]
        starts = list(accumulate(self.replicas, initial=0))
        devices = [tuple(range(lo, hi)) for lo, hi in pairwise(starts)]
        if self.turned:
            devices = [tuple(starts[-1] - 1 - d for d in held) for held in devices]
        stages = tuple(
            Stage(
                range(lo, hi),
                devices[group],
                (self.micro_batch_rows,) * self.replicas[group]
                if self.in_turn
                else split_rows(self.micro_batch_rows, weights(stage, self.replicas[group])),
                self.recompute and stage % 3 != 1,
                in_turn=self.in_turn and self.replicas[group] > 1,
            )
            for stage, (group, (lo, hi)) in enumerate(zip(placement, pairwise(ends), strict=True))
        )
        plan = Plan(stages, self.micro_batches, self.micro_batch_rows, self.schedule)
        plan = with_recompute(plan, False, by_block=True) if self.by_block else plan
        return replace(plan, costs=unequal_costs(len(stages))) if self.costs else plan


def weights(stage: int, replicas: int) -> tuple[int, ...]:
    """Shares of a micro-batch's rows: no two stages in a row have the same."""
    return tuple(1 + 2 * ((stage + replica) % replicas == 0) for replica in range(replicas))


def unequal_costs(stages: int) -> tuple[StageCost, ...]:
    """Stages up to three times as slow as others, with messages that take their time."""
    draw = random.Random(stages)
    seconds = (0.5, 1.0, 1.5)
    return tuple(
        StageCost(*(draw.choice(seconds) for _ in range(3)), draw.choice((0.0, 0.25, 0.75)))
        for _ in range(stages)
    )


def layouts(schedule: str, rounds: tuple[int, ...] = (1, 2, 3)) -> list[tuple[PlacementStyle, int]]:
    """How a schedule may place its stages: the style, and the stages of a device group."""
    if FAMILIES[schedule].is_searched:
        return [("straight", 1), ("folded", 2), ("looped", 2), ("folded", 3)]
    style = FAMILIES[schedule].placement
    if style in ("straight", "mirrored"):
        return [(style, 1)]
    return [(style, count) for count in rounds if FAMILIES[schedule].rounds != 2 or count == 2]


def representative() -> Iterator[Case]:
    """For every schedule and layout pipelines of two numbers of groups, the rest in turns."""
    replications = {groups: cycle(found) for groups, found in REPLICATIONS.items()}
    turns = cycle(product(("sgd", "adamw"), (False, True), (False, True), (False, True)))
    for schedule in SYNCHRONOUS:
        searched = FAMILIES[schedule].is_searched
        for style, rounds in layouts(schedule)[: 2 if searched else None]:
            for groups in some_groups(schedule, rounds):
                few, many = max(1, groups - 1), min(2 * groups + 1, 4 if searched else 9)
                optimizer, recompute, costs, turned = next(turns)
                case = Case(
                    schedule,
                    next(replications[groups]),
                    few if (groups + rounds) % 3 == 0 else many,
                    rounds,
                    style,
                    optimizer=optimizer,
                    recompute=recompute,
                    costs=costs,
                    turned=turned,
                )
                yield case


def some_groups(schedule: str, rounds: int) -> tuple[int, ...]:
    """Two numbers of groups, in turns: `every_case` has all."""
    several = FAMILIES[schedule].is_searched or len(layouts(schedule)) > 1
    turn = rounds if several else 1 + SYNCHRONOUS.index(schedule) % 2
    return {1: (2, 4), 2: (1, 3), 3: (2,)}[turn]


def of_every_kind() -> dict[str, list[Case]]:
    """Models, stages and messages that the other cases do not have, by what is in them."""

    def cases(models: str, replications: str, schedules: str = "gpipe 1f1b", **more: Any) -> Any:
        for model, text, schedule in product(
            models.split(), replications.split(), schedules.split()
        ):
            style = FAMILIES[schedule].placement
            rounds = 2 if style in ("looped", "folded") else 1
            replicas = tuple(map(int, text.split("-")))
            sizes = {"micro_batches": 3, "micro_batch_rows": 4}
            made = Case(schedule, replicas, rounds=rounds, style=style, model=model, **sizes | more)
            yield made

    two = "interleaved zb-v"
    return {
        "a chain with batch norm": [*cases("convolutions", "1-1-1-1 3-1", "1f1b")],
        "tied weights and skip tensors": [
            *cases("gpt2", "2-1", "1f1b"),
            *cases("t5", "1-1-1-1 1-3", "1f1b"),
        ],
        "batch norm": [*cases("resnet", "2-2", "1f1b")],
        "models that round parts to float32": [*cases("llama qwen2_tied", "1-1", "1f1b")],
        "samples with several rows": [*cases("pictures", "1-1-1 1-3", "1f1b zb-h1")],
        "recompute": [*cases("convolutions", "2-1", recompute=True)],
        "recompute by block": [
            *cases("gpt2 t5", "2-2", "1f1b chimera", by_block=True),
            *cases("convolutions", "2-1", "gpipe interleaved", by_block=True),
            *cases("deep", "1-1", "1f1b interleaved", by_block=True),
        ],
        "a last micro-batch of fewer rows": [
            *cases("deep convolutions", "1-1", micro_batches=4, micro_batch_rows=2)
        ],
        "stages that share a rank": [
            *cases("gpt2", "1 2-1", two),
            *cases("t5", "1-1", two),
            *cases("convolutions", "2 1-1", "zb-v", recompute=True),
        ],
        "micro-batches in turn": [
            *cases("deep", "2-1 1-2 2-2", "1f1b", in_turn=True),
            *cases("deep", "3-1", "gpipe", in_turn=True),
            *cases("deep gpt2", "1-3", "zb-h1", in_turn=True),
            *cases("convolutions", "2-1", in_turn=True, recompute=True),
        ],
        "process groups": [
            *cases("deep", "2-1 1-1-1", "1f1b", transport="process-groups"),
            *cases("convolutions", "2-1", "gpipe", transport="process-groups"),
        ],
        "messages larger than slots and rings": [
            *cases("deep", "2-1 1-1-1", "1f1b", slot_bytes=64),
            *cases("convolutions", "2-1", "gpipe", slot_bytes=64),
        ],
    }


def every_case() -> Iterator[Case]:
    """The product of all there is to choose."""
    for schedule in SYNCHRONOUS:
        for style, rounds in layouts(schedule):
            for groups, replications in REPLICATIONS.items():
                counts = sorted({1, max(1, groups - 1), groups, groups + 1, 2 * groups, 9})
                for number, (replicas, count) in enumerate(product(replications, counts)):
                    case = Case(
                        schedule,
                        replicas,
                        count,
                        rounds,
                        style,
                        optimizer=("sgd", "adamw")[number % 2],
                        recompute=number % 3 == 1,
                        costs=number % 4 > 1,
                        turned=number % 5 == 0,
                    )
                    yield case


def model_cases(
    model: str, layers: int, *, dropout: bool = False, autocast: bool = False
) -> Iterator[Case]:
    """A model of few layers under every schedule: straight, replicated, and several stages each."""
    # AdamW turns the rounding of gradients near zero into steps: a norm has many of these, and
    # bfloat16 rounds all.
    precise = model in ("deep", "dropping") and not autocast
    turns = cycle(("sgd", "adamw") if precise else ("sgd",))
    for schedule in SYNCHRONOUS:
        for style, rounds in layouts(schedule, (1, 2))[:2]:
            for number, replicas in enumerate(((1, 1), (2, 2), (1, 2, 1), (1, 1, 1, 1))):
                case = Case(
                    schedule,
                    replicas,
                    3 if number % 2 else 5,
                    rounds,
                    style,
                    model=model,
                    optimizer=next(turns),
                    micro_batch_rows=4,
                    recompute=number == 2,
                    turned=number == 1,
                    dropout=dropout,
                    autocast=autocast,
                )
                if len(replicas) * rounds <= layers:
                    yield case


def torchrun_cases(ranks: int, transport: str) -> Iterator[Case]:
    """A few schedules of every kind on so many ranks."""
    straight = ("1f1b", "gpipe", "fbp-as", "zb-h1", "list")
    for number, schedule in enumerate(straight if ranks < 8 else straight[:4]):
        half = (2,) * (ranks // 2) if ranks > 2 else (2,)
        replicas = (1,) * ranks if number % 2 == 0 else half
        yield Case(schedule, replicas, 5, transport=transport, costs=number % 2 == 0)
    for schedule in ("interleaved", "hanayo", "zb-v", "dualpipe-v"):
        style = FAMILIES[schedule].placement
        yield Case(schedule, (1,) * ranks, ranks + 1, 2, style, "deeper", transport=transport)
    for schedule in MIRRORED:
        yield Case(schedule, (1,) * ranks, ranks, 1, "mirrored", transport=transport)


def drawn(count: int, seed: int) -> Iterator[Case]:
    """Different cases at random, the same for a seed."""
    draw, known = random.Random(seed), set[Case]()
    while len(known) < count:
        schedule = draw.choice(SYNCHRONOUS)
        style, rounds = draw.choice(layouts(schedule))
        case = Case(
            schedule,
            draw.choice(REPLICATIONS[draw.randint(1, 4)]),
            draw.randint(1, 11),
            rounds,
            style,
            model=draw.choice(("deep", "skips")),
            optimizer=draw.choice(("sgd", "adamw")),
            micro_batch_rows=draw.randint(4, 7),
            recompute=draw.random() < 0.3,
            costs=draw.random() < 0.5,
            turned=draw.random() < 0.5,
            transport=draw.choice(("auto", "auto", "auto", "process-groups")),
        )
        if case not in known:
            known.add(case)
            yield case
