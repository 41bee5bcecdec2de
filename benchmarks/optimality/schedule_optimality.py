"""How far each schedule family is from the optimum of its placement, on small pipelines.

    python benchmarks/optimality/schedule_optimality.py [--out results.json] [--work 20]

The optimum is that of `tests/reference/exact.py`: for families with split backwards of
split ones, for the others of whole ones, always with the stages where the family has them. All
figures come from the schedules' own clock, so they are the same on every machine; `--work` is how
long the solver may search for one optimum, in its own count.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.errors import BadInput
from penstock.schedule.clock import makespan_s
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost, placement_of_style
from penstock.schedule.validate import validate
from penstock.schedule.weight_rule import SYNCHRONOUS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from reference.exact import ExactAnswer, find_exact

GROUPS, MICRO_BATCHES = 4, 6
STYLES: tuple[PlacementStyle, ...] = ("straight", "looped", "folded", "mirrored")


@dataclass(frozen=True)
class Pipeline:
    """What a micro-batch takes on each device group, over all of its stages."""

    name: str
    work_s: tuple[tuple[float, float, float], ...]
    transfer_s: float = 0.0
    memory: float | None = None


PIPELINES = (
    Pipeline("uniform", ((1, 1, 1),) * 4),
    Pipeline("1 : 1.2 : 0.9", ((1, 1.2, 0.9),) * 4),
    Pipeline("unequal stages", ((0.7, 0.8, 0.5), (1.2, 1.5, 1.1), (1, 1.1, 0.9), (1.4, 1.3, 1.6))),
    Pipeline("slow links", ((1, 1.2, 0.9),) * 4, transfer_s=0.5),
    Pipeline("slow links, memory of 4", ((1, 1.2, 0.9),) * 4, transfer_s=0.5, memory=4.0),
    Pipeline("memory of 3", ((1, 1.2, 0.9),) * 4, memory=3.0),
    Pipeline("memory of 2", ((1, 1.2, 0.9),) * 4, memory=2.0),
)


def shape_of(pipeline: Pipeline, style: PlacementStyle) -> PipelineShape:
    """The pipeline with one stage a group, or with two where the style has rounds."""
    rounds = 2 if style in ("looped", "folded") else 1
    placement = placement_of_style(style, GROUPS, rounds)
    return PipelineShape(
        len(placement),
        MICRO_BATCHES,
        placement=placement,
        costs=tuple(
            StageCost(
                *(part / rounds for part in pipeline.work_s[group]),
                transfer_s=pipeline.transfer_s,
                saved_bytes=1 / rounds,
                kept_bytes=0.5 / rounds,
            )
            for group in placement
        ),
        memory_bytes=() if pipeline.memory is None else (pipeline.memory,) * GROUPS,
        mirrored=style == "mirrored",
    )


@cache
def optimum(pipeline: Pipeline, style: PlacementStyle, split: bool, work: float) -> ExactAnswer:
    """The best order, found once."""
    return find_exact(shape_of(pipeline, style), split=split, work_limit=work)


def made(name: str, shape: PipelineShape) -> Schedule | None:
    """The schedule of a family, or None where it is refused or takes more memory than there is."""
    try:
        schedule = FAMILIES[name].make(shape)
        validate(schedule, shape)
    except BadInput:
        return None
    return schedule


def families() -> Iterator[tuple[str, PlacementStyle]]:
    """Every synchronous family with each placement that it takes."""
    for name, family in FAMILIES.items():
        for style in STYLES:
            if style != family.placement and not family.is_searched:
                continue
            schedule = made(name, shape_of(PIPELINES[0], style))
            if schedule and not schedule.concurrent and schedule.weights == SYNCHRONOUS:
                yield name, style


def measured(work: float) -> Iterator[dict[str, object]]:
    """One row for each family and pipeline."""
    for name, style in families():
        for pipeline in PIPELINES:
            shape = shape_of(pipeline, style)
            schedule = made(name, shape)
            row: dict[str, object] = {"schedule": name, "placement": style, "on": pipeline.name}
            if schedule is None:
                yield {**row, "refused": True}
                continue
            split = any(action.kind == "I" for order in schedule.orders for action in order)
            best = optimum(pipeline, style, split, work)
            taken_s = makespan_s(schedule, shape)
            yield {
                **row,
                "backwards": "split" if split else "whole",
                "makespan_s": taken_s,
                "best_s": best.makespan_s,
                "bound_s": best.bound_s,
                "proven": best.optimal,
                "ratio": taken_s / best.makespan_s,
            }


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    """Families down, pipelines across."""
    yield "| schedule | placement | " + " | ".join(p.name for p in PIPELINES) + " |"
    yield "|---" * (len(PIPELINES) + 2) + "|"
    cells: dict[tuple[object, object], list[str]] = {}
    for row in rows:
        text = "-" if "refused" in row else f"{row['ratio']:.3f}{'' if row['proven'] else ' *'}"
        cells.setdefault((row["schedule"], row["placement"]), []).append(text)
    for (name, style), texts in cells.items():
        yield f"| `{name}` | {style} | {' | '.join(texts)} |"


def optima(rows: list[dict[str, object]]) -> Iterator[str]:
    """The optima themselves."""
    yield "| placement | backwards | " + " | ".join(p.name for p in PIPELINES) + " |"
    yield "|---" * (len(PIPELINES) + 2) + "|"
    best: dict[tuple[object, object], dict[object, str]] = {}
    for row in rows:
        if "refused" not in row:
            text = f"{row['best_s']:.4g}"
            if not row["proven"]:
                text = f"{row['bound_s']:.4g} to {text}"
            best.setdefault((row["placement"], row["backwards"]), {})[row["on"]] = text
    for (style, backwards), found in best.items():
        texts = " | ".join(found.get(pipeline.name, "-") for pipeline in PIPELINES)
        yield f"| {style} | {backwards} | {texts} |"


def main() -> None:
    """Measure, print the tables and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--work", type=float, default=20.0)
    arguments = parser.parse_args()
    rows = list(measured(arguments.work))
    arguments.out.write_text(json.dumps({"work": arguments.work, "rows": rows}, indent=1) + "\n")
    print("\n".join([*table(rows), "", *optima(rows)]))


if __name__ == "__main__":
    main()
