"""Pairs to compare: our schedules, the rival's class for the same, and the cuts of both."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.plan import Plan, Stage
from penstock.schedule.shape import PlacementStyle, placement_of_style


@dataclass(frozen=True)
class Case:
    """A schedule of ours, the class of torch.distributed.pipelining for it (none: ours alone).

    ``chunks`` is the number of stages on each rank.
    """

    name: str
    family: str
    style: PlacementStyle
    chunks: int
    rival: str = ""


CASES = {
    case.name: case
    for case in (
        Case("1f1b", "1f1b", "straight", 1, "Schedule1F1B"),
        Case("gpipe", "gpipe", "straight", 1, "ScheduleGPipe"),
        Case("interleaved", "interleaved", "looped", 2, "ScheduleInterleaved1F1B"),
        Case("breadth-first", "breadth-first", "looped", 2, "ScheduleLoopedBFS"),
        Case("zero-bubble", "zero-bubble", "looped", 2, "ScheduleInterleavedZeroBubble"),
        Case("zb-v", "zb-v", "folded", 2, "ScheduleZBVZeroBubble"),
        Case("dualpipe-v", "dualpipe-v", "folded", 2, "ScheduleDualPipeV"),
        Case("hanayo", "hanayo", "folded", 2),
        Case("chimera", "chimera", "mirrored", 1),
        Case("dualpipe", "dualpipe", "mirrored", 1),
        Case("zb-h1", "zb-h1", "straight", 1),
        Case("zb-h2", "zb-h2", "straight", 1),
        Case("v-half", "v-half", "folded", 2),
        Case("v-min", "v-min", "folded", 2),
        Case("list", "list", "straight", 1),
        Case("early-backward", "early-backward", "straight", 1),
        Case("wavefront", "wavefront", "straight", 1),
        Case("1f1b-sno", "1f1b-sno", "straight", 1),
    )
}

GPT_CUTS = {2: (6, 4), 4: (4, 2, 2, 2), 8: (3, 1, 1, 1, 1, 1, 1, 1)}
"""Blocks a stage, the embedding the first of them and the head the last."""

GPT_FOLDED_CUTS = {4: (3, 3, 2, 2), 8: (2, 2, 1, 1, 1, 1, 1, 1)}


def bounds_of(case: Case, model: str, blocks: int, ranks: int) -> list[range]:
    """The blocks of every stage: balanced by measured time on gpt, evenly on tiny."""
    stages = ranks * case.chunks
    cuts = GPT_FOLDED_CUTS if case.style == "folded" else GPT_CUTS
    if model == "gpt" and blocks == 10 and stages in cuts:
        sizes = list(cuts[stages])
    else:
        sizes = [blocks * (s + 1) // stages - blocks * s // stages for s in range(stages)]
    starts = [sum(sizes[:s]) for s in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def placement_of(case: Case, ranks: int) -> tuple[int, ...]:
    """The rank of every stage (its first one, where stages are held twice)."""
    return placement_of_style(case.style, ranks, case.chunks)


def plan_of(
    case: Case,
    bounds: list[range],
    layer_names: Sequence[str],
    ranks: int,
    count: int,
    rows: int,
    schedule: str = "",
) -> Plan:
    """Our plan for the cut of a captured sequence of blocks; the loss is on the last stage.

    Another ``schedule`` may take the same stages.
    """
    owners = [name.partition(".")[0] for name in layer_names]
    placement = placement_of(case, ranks)
    stages = []
    for stage, blocks in enumerate(bounds):
        last = stage == len(bounds) - 1
        stop = len(owners) if last else owners.index(str(blocks.stop))
        layers = range(owners.index(str(blocks.start)), stop)
        stages.append(Stage(layers, (placement[stage],), (rows,)))
    return Plan(tuple(stages), count, rows, schedule or case.family)
