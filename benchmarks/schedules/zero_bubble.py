"""The automatic zero-bubble search beside the zero-bubble authors' generators.

    python benchmarks/schedules/zero_bubble.py [--out results.json] [--stages 16]

The authors' figures are data: their generators (Zero Bubble, ICLR 2024; Pipeline Parallelism with
Controllable Memory, NeurIPS 2024) were run once, and the orders that they gave replayed, each
action as soon as its order and its inputs allow, without transfers. Ours get the memory that
theirs used, in the same measure: a forward saves all, I frees half of it, W the rest.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np

from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.searched.automatic_zero_bubble import zero_bubble
from penstock.schedule.searched.bound import makespan_bound_s
from penstock.schedule.shape import PipelineShape, StageCost, folded
from penstock.schedule.validate import validate

REPEATS = 3
ROUNDED = 0.05
"""The authors' makespans are known to one decimal."""

EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (1.0, 1.2, 0.9)
SETTINGS = ("ZB 1x", "ZB 2x", "ZB-V 1x", "ZB-V 2x", "V-Half", "V-Min")

# Makespan in units of F and milliseconds to generate, in the order of SETTINGS.
ALIKE = {
    (4, 8, EQUAL): ((27.0, 2), (27.0, 2), (25.5, 7), (25.5, 8), (26.5, 30), (29.5, 16)),
    (4, 8, UNEQUAL): ((28.7, 2), (27.8, 6), (26.6, 7), (26.6, 8), (28.4, 30), (34.5, 16)),
    (4, 32, EQUAL): ((99.0, 15), (99.0, 15), (97.5, 25), (97.5, 32), (98.5, 102), (101.5, 63)),
    (4, 32, UNEQUAL): (
        ((103.1, 15), (102.2, 15), (101.0, 24), (101.0, 33), (102.8, 103), (120.8, 63))
    ),
    (8, 16, EQUAL): ((55.0, 15), (55.0, 15), (51.5, 25), (51.5, 31), (56.5, 198), (61.5, 112)),
    (8, 16, UNEQUAL): ((58.7, 15), (56.6, 15), (53.8, 31), (53.8, 31), (60.6, 199), (71.8, 114)),
    (8, 32, EQUAL): ((103.0, 26), (103.0, 30), (99.5, 49), (99.5, 69), (104.5, 361), (109.5, 223)),
    (8, 32, UNEQUAL): (
        ((108.3, 30), (106.2, 30), (103.4, 57), (103.4, 80), (110.2, 362), (129.4, 222))
    ),
    (8, 64, EQUAL): (
        ((199.0, 57), (199.0, 57), (195.5, 114), (195.5, 148), (200.5, 714), (205.5, 440))
    ),
    (8, 64, UNEQUAL): (
        ((207.5, 58), (205.4, 59), (202.6, 120), (202.6, 167), (209.4, 671), (244.6, 434))
    ),
    (16, 32, EQUAL): (
        ((111.0, 62), (111.0, 58), (103.5, 117), (103.5, 152), (116.5, 1516), (125.5, 880))
    ),
    (16, 32, UNEQUAL): (
        ((118.7, 64), (114.2, 67), (108.2, 126), (108.2, 152), (125.2, 1487), (147.2, 876))
    ),
    (16, 64, EQUAL): (
        ((207.0, 121), (207.0, 120), (199.5, 240), (199.5, 337), (212.5, 2746), (221.5, 1713))
    ),
    (16, 64, UNEQUAL): (
        ((217.9, 119), (213.4, 132), (207.4, 227), (207.4, 321), (224.4, 2721), (262.4, 1720))
    ),
}

# What theirs held at most, in micro-batches of a whole device, where it is not p or 2 p.
PEAKS = {
    (4, 8, "ZB 2x"): 7.5,
    (8, 16, EQUAL, "ZB 2x"): 15.5,
    (16, 32, EQUAL, "ZB 2x"): 31.5,
    (4, 8, "ZB-V 2x"): 6.0,
    (8, 16, "ZB-V 2x"): 12.0,
    (16, 32, "ZB-V 2x"): 24.0,
    (4, "V-Half"): 3.0,
    (8, "V-Half"): 5.0,
    (16, "V-Half"): 9.0,
    (4, "V-Min"): 2.0,
    (8, "V-Min"): 4.0,
    (16, "V-Min"): 6.0,
}

# With 1:1.2:0.9 times a factor for each stage: makespans of ZB 1x and ZB 2x, the better of those
# that got the stages' own times and one time for all.
UNEVEN = {
    (4, 16, "last x 1.5"): (77.4, 77.4),
    (4, 16, "first x 1.5"): (76.5, 74.4),
    (4, 16, "0.75 to 1.25"): (64.8, 64.8),
    (4, 16, "middle x 1.5"): (77.1, 76.4),
    (8, 32, "last x 1.5"): (155.8, 155.8),
    (8, 32, "first x 1.5"): (153.7, 148.8),
    (8, 32, "0.75 to 1.25"): (130.8, 130.8),
    (8, 32, "middle x 1.5"): (154.9, 152.8),
    (16, 64, "last x 1.5"): (312.6, 312.6),
    (16, 64, "first x 1.5"): (308.1, 298.3),
    (16, 64, "0.75 to 1.25"): (262.8, 262.8),
    (16, 64, "middle x 1.5"): (310.5, 305.6),
}


@dataclass(frozen=True)
class Row:
    """One cell of the authors' tables, and ours."""

    case: str
    setting: str
    theirs: float
    ours: float
    bound: float
    room: float
    peak: float
    theirs_ms: float | None
    ours_ms: float

    @property
    def verdict(self) -> str:
        """The verdict: ours is shorter, as long or longer, as far as theirs is known."""
        if self.ours < self.theirs - ROUNDED:
            return "shorter"
        return "equal" if self.ours <= self.theirs + ROUNDED + 1e-9 else "LONGER"


def peak_of(stages: int, micro_batches: int, times: tuple[float, ...], setting: str) -> float:
    """The memory that the authors' order takes, in micro-batches."""
    for key in ((stages, micro_batches, times, setting), (stages, micro_batches, setting)):
        if key in PEAKS:
            return PEAKS[key]
    return PEAKS.get((stages, setting), stages * (2.0 if setting.endswith("2x") else 1.0))


def shape_of(
    groups: int, micro_batches: int, factors: list[tuple[float, ...]], room: float, chunks: int
) -> PipelineShape:
    """A pipeline of one or two chunks a group; a device's times are halved between two."""
    costs = [
        StageCost(
            f / chunks, i / chunks, w / chunks, saved_bytes=1 / chunks, kept_bytes=0.5 / chunks
        )
        for f, i, w in factors
    ]
    return PipelineShape(
        groups * chunks,
        micro_batches,
        placement=folded(groups, chunks),
        costs=tuple(costs[group] for group in folded(groups, chunks)),
        memory_bytes=(room,) * groups,
    )


def measure(
    case: str, setting: str, shape: PipelineShape, theirs: float, theirs_ms: float | None
) -> Row:
    """Generate, check and time one order."""
    schedule = zero_bubble(shape)
    validate(schedule, shape)
    taken = []
    for _ in range(REPEATS):
        begin = process_time()
        zero_bubble(shape)
        taken.append(process_time() - begin)
    return Row(
        case,
        setting,
        theirs,
        round(makespan_s(schedule, shape), 6),
        round(makespan_bound_s(shape), 6),
        shape.memory_bytes[0],
        max(memory_peaks_bytes(schedule, shape)),
        theirs_ms,
        round(1e3 * median(taken), 1),
    )


def rows(stages: tuple[int, ...]) -> Iterator[Row]:
    """Both tables, row after row."""
    for (p, m, times), figures in ALIKE.items():
        for setting, (theirs, theirs_ms) in zip(SETTINGS, figures, strict=True):
            if p in stages:
                chunks = 1 if setting.startswith("ZB ") else 2
                shape = shape_of(p, m, [times] * p, peak_of(p, m, times, setting), chunks)
                ratio = ":".join(f"{part:g}" for part in times)
                yield measure(f"{p}, {m}, {ratio}", setting, shape, theirs, theirs_ms)
    for (p, m, name), figures in UNEVEN.items():
        for setting, theirs in zip(SETTINGS[:2], figures, strict=True):
            if p in stages:
                times = [tuple(float(f) * t for t in UNEQUAL) for f in factors_of(name, p)]
                shape = shape_of(p, m, times, p * float(setting[3]), chunks=1)
                yield measure(f"{p}, {m}, {name}", setting, shape, theirs, None)


def factors_of(name: str, stages: int) -> list[float]:
    """Seconds of each stage as multiples of the usual ones."""
    if name == "0.75 to 1.25":
        return np.linspace(0.75, 1.25, stages).tolist()
    longer = {"last": stages - 1, "first": 0, "middle": stages // 2}[name.split()[0]]
    return [1.5 if stage == longer else 1.0 for stage in range(stages)]


def main() -> None:
    """Print the table as it grows, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stages", type=int, nargs="*", default=[4, 8, 16])
    options = parser.parse_args()
    zero_bubble(shape_of(2, 2, [EQUAL] * 2, 2.0, 2))  # loads what is compiled
    print(
        "| p, m, times | setting | theirs | ours | | bound | gap | room | peak | ms theirs | ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    made = []
    for row in rows(tuple(options.stages)):
        made.append(row)
        print(
            f"| {row.case} | {row.setting} | {row.theirs:.1f} | {row.ours:.2f} | {row.verdict} "
            f"| {row.bound:.2f} | {row.ours / row.bound - 1:.1%} | {row.room:g} | {row.peak:g} "
            f"| {'' if row.theirs_ms is None else f'{row.theirs_ms:g}'} | {row.ours_ms:.0f} |",
            flush=True,
        )
    verdicts = [row.verdict for row in made]
    print({verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))})
    if options.out:
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        table = [asdict(row) | {"verdict": row.verdict} for row in made]
        options.out.write_text(json.dumps({"machine": machine, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
