"""PyTorch's pipeline schedules beside ours: same pipeline, no more memory, one run.

    python benchmarks/schedules/torch_schedules.py [--out torch_results.json]

The orders are those that `torch.distributed.pipelining.schedules` (torch 2.13) makes for its own
executor, read without a process group. Both are played by `penstock.schedule.clock`, each action as
soon as its order and its inputs allow. Ours get the memory of theirs: what its fullest rank saves.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch.distributed.pipelining import schedules as theirs

from penstock.errors import BadInput
from penstock.schedule.action import Action
from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape, StageCost, placement_of_style
from penstock.schedule.validate import check_playable, validate

REPEATS = 3
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.9))
TRANSFERS = (0.0, 0.1)
"""F, I and W of a whole device, and the way from one to the next, in units of F."""


@dataclass(frozen=True)
class Kind:
    """A schedule class of theirs, and the families of ours that are of the same kind."""

    torch_class: type
    style: str
    chunks: tuple[int, ...]
    families: tuple[str, ...]


KINDS = (
    Kind(theirs.ScheduleGPipe, "straight", (1,), ("gpipe", "list")),
    Kind(theirs.Schedule1F1B, "straight", (1,), ("1f1b", "list")),
    Kind(theirs.ScheduleLoopedBFS, "looped", (2, 4), ("breadth-first", "list")),
    Kind(theirs.ScheduleInterleaved1F1B, "looped", (2, 4), ("interleaved", "list")),
    Kind(theirs.ScheduleInterleavedZeroBubble, "looped", (1, 2, 4), ("zero-bubble",)),
    Kind(theirs.ScheduleZBVZeroBubble, "folded", (2,), ("zb-v", "zero-bubble")),
    Kind(theirs.ScheduleDualPipeV, "folded", (2,), ("dualpipe-v", "zero-bubble")),
)


@dataclass(frozen=True)
class Row:
    """One pipeline, one class of theirs, one family of ours."""

    torch_class: str
    family: str
    groups: int
    micro_batches: int
    chunks: int
    times: tuple[float, ...]
    transfer: float
    theirs: float
    ours: float | None
    room: float
    peak: float | None
    theirs_ms: float
    ours_ms: float


def orders_of(
    kind: Kind, groups: int, micro_batches: int, chunks: int
) -> list[list[Action]] | None:
    """The order of every rank, or nothing where their class refuses the pipeline."""
    if kind.torch_class is theirs.Schedule1F1B and micro_batches < groups:
        return None  # what the class exports then names micro-batches that do not exist
    schedule: Any = kind.torch_class.__new__(kind.torch_class)
    schedule._n_microbatches = micro_batches
    schedule._num_stages = schedule.num_stages = groups * chunks
    schedule.pp_group_size, schedule.n_local_stages = groups, chunks
    schedule._stages = [None] * chunks
    if chunks == 1 and kind.style == "straight":
        lists = schedule._get_pipeline_order()
    else:
        schedule.number_of_rounds = max(1, micro_batches // groups)
        schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
        rounds_matter = hasattr(kind.torch_class, "_add_bubbles_to_actions") or (
            kind.torch_class is theirs.ScheduleInterleaved1F1B
        )
        if rounds_matter and micro_batches % schedule.number_of_rounds:
            return None
        if kind.torch_class is theirs.ScheduleDualPipeV and micro_batches < groups * chunks:
            return None
        lists = {r: schedule._calculate_single_rank_operations(r) for r in range(groups)}
        if hasattr(schedule, "_add_bubbles_to_actions"):
            schedule.pipeline_order = lists
            lists = schedule._add_bubbles_to_actions(groups * chunks)
    orders = [list(read(lists[rank])) for rank in range(groups)]
    if kind.torch_class is theirs.Schedule1F1B:
        # The exported list of the last rank counts its forwards from 1; what runs starts at 0.
        last = groups - 1
        orders[last] = [
            Action(a.kind, a.stage, a.micro_batch - (a.kind == "F")) for a in orders[last]
        ]
    return orders


def read(actions: list[Any]) -> Iterator[Action]:
    """Their compute actions as ours; two that they overlap come one after the other."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from read(list(action.sub_actions))
        elif action.computation_type.value in ("F", "B", "I", "W"):
            kind = action.computation_type.value
            yield Action(kind, action.stage_index, action.microbatch_index)  # type: ignore[arg-type]


def pipeline(
    kind: Kind, groups: int, micro_batches: int, chunks: int, times: tuple[float, ...], way: float
) -> PipelineShape:
    """Alike stages; a device's times and memory are shared between its chunks."""
    f, i, w = (part / chunks for part in times)
    cost = StageCost(f, i, w, way, saved_bytes=1 / chunks, kept_bytes=0.5 / chunks)
    return PipelineShape(
        groups * chunks,
        micro_batches,
        placement=placement_of_style(kind.style, groups, chunks),  # type: ignore[arg-type]
        costs=(cost,) * (groups * chunks),
    )


def timed(make: Callable[[], object]) -> float:
    """Milliseconds of processor time."""
    taken = []
    for _ in range(REPEATS):
        begin = process_time()
        make()
        taken.append(process_time() - begin)
    return round(1e3 * median(taken), 3)


def rows(groups: list[int]) -> Iterator[Row]:
    """Every pipeline of the grid that their class accepts."""
    for kind, p in product(KINDS, groups):
        for chunks, factor in product(kind.chunks, (0.5, 1, 2, 4)):
            m = max(1, int(p * factor))
            orders = orders_of(kind, p, m, chunks)
            if orders is None:
                continue
            for times, way in product(TIMES, TRANSFERS):
                shape = pipeline(kind, p, m, chunks, times, way)
                yield from beside(kind, shape, orders, (p, m, chunks, times, way))


def beside(
    kind: Kind, shape: PipelineShape, orders: list[list[Action]], case: tuple[Any, ...]
) -> Iterator[Row]:
    """One row for each family of ours."""
    p, m, chunks, *_ = case
    other = schedule_from_actions(orders)
    check_playable(other, shape)
    room = max(memory_peaks_bytes(other, shape))
    limited = PipelineShape(
        shape.stages, m, shape.placement, costs=shape.costs, memory_bytes=(room,) * p
    )
    theirs_ms = timed(lambda: orders_of(kind, p, m, chunks))
    for family in kind.families:
        make = FAMILIES[family].make
        ours = peak = None
        ours_ms = 0.0
        try:
            schedule: Schedule = make(limited)
        except BadInput:
            pass  # the family needs more memory than theirs, or another placement
        else:
            validate(schedule, limited)
            ours = makespan_s(schedule, shape)
            peak = max(memory_peaks_bytes(schedule, shape))
            ours_ms = timed(lambda make=make: make(limited))
        name = kind.torch_class.__name__
        yield Row(
            name, family, *case, makespan_s(other, shape), ours, room, peak, theirs_ms, ours_ms
        )


def summary(made: list[Row]) -> Iterator[str]:
    """One line for each class of theirs and family of ours."""
    yield "| theirs | ours | cases | shorter | equal | longer | unfit | mean | ms theirs | ms |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, family in dict.fromkeys((row.torch_class, row.family) for row in made):
        mine = [row for row in made if (row.torch_class, row.family) == (name, family)]
        ratios = [row.ours / row.theirs for row in mine if row.ours is not None]
        counts = (
            sum(ratio < 1 - 1e-9 for ratio in ratios),
            sum(abs(ratio - 1) <= 1e-9 for ratio in ratios),
            sum(ratio > 1 + 1e-9 for ratio in ratios),
        )
        mean = sum(ratios) / len(ratios) if ratios else float("nan")
        ours_ms = [row.ours_ms for row in mine if row.ours is not None]
        yield (
            f"| {name} | {family} | {len(mine)} | {' | '.join(map(str, counts))} "
            f"| {len(mine) - len(ratios)} | {mean:.3f} | {median(r.theirs_ms for r in mine):.2f} "
            f"| {median(ours_ms) if ours_ms else 0:.2f} |"
        )


def main() -> None:
    """Print the summary, and what is longer than theirs, and write all rows down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--groups", type=int, nargs="*", default=[2, 4, 8])
    options = parser.parse_args()
    made = list(rows(options.groups))
    for line in summary(made):
        print(line)
    for row in made:
        if row.ours is not None and row.ours > row.theirs * (1 + 1e-9):
            print("LONGER", row)
    if options.out:
        table = {"torch": torch.__version__, "rows": [asdict(row) for row in made]}
        options.out.write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
