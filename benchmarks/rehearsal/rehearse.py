"""Simulated against rehearsed iteration time, over plans, schedules and clusters.

    python benchmarks/rehearsal/rehearse.py --out benchmarks/rehearsal/results.json
    python benchmarks/rehearsal/rehearse.py --only 64 --cases 2

Each case is an even cut of a published profile over the first devices of a cluster, carried out by
one real process for each device: two iterations, at the time scale that `penstock rehearse`
chooses. A plan with replicas puts two devices on each stage. The result says how much of the
machine others used meanwhile, and how late waits ended.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "prediction"))

from other_load import other_load  # noqa: E402

from penstock.cluster.toml_file import find_cluster  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from penstock.machine import processor_name  # noqa: E402
from penstock.plan.plan import Plan, Stage  # noqa: E402
from penstock.profile.find import find_profile  # noqa: E402
from penstock.profile.model_profile import ModelProfile  # noqa: E402
from penstock.rehearse.emulation import emulation_of  # noqa: E402
from penstock.rehearse.rehearsal import differences, rehearse  # noqa: E402
from penstock.schedule.registry import FAMILIES  # noqa: E402
from penstock.schedule.shape import placement_of_style  # noqa: E402

SCHEDULES = (
    "gpipe",
    "1f1b",
    "early-backward",
    "wavefront",
    "interleaved",
    "breadth-first",
    "hanayo",
    "chimera",
    "dualpipe",
    "dualpipe-v",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "list",
)
PLACES = (
    ("bert-48", "dapple-a", 4),
    ("gnmt-16", "dapple-c", 4),
    ("bert-48", "slow-host", 8),
    ("bert-48", "dapple-b", 16),
)
LARGE = (("bert-48", "h100-pod-256", 32, 1), ("bert-48", "h100-pod-256", 64, 2))
ITERATIONS = 2


@dataclass(frozen=True)
class Case:
    """A plan to rehearse; ``replicas`` devices share each stage."""

    model: str
    cluster: str
    ranks: int
    schedule: str
    replicas: int = 1


@dataclass
class Found:
    """The result of a case."""

    case: Case
    micro_batches: int
    time_scale: float
    simulated_s: float
    rehearsed_s: float
    error: float
    start_s: float
    mean_late_s: float
    others_cores: float
    differences: list[str]


def cases() -> Iterator[Case]:
    """All cases, those with few ranks first."""
    for place in PLACES:
        for schedule in SCHEDULES:
            yield Case(*place, schedule)
        for schedule in ("1f1b", "gpipe", "zb-h1"):
            yield Case(*place, schedule, replicas=2)
    for *place, replicas in LARGE:
        for schedule in ("1f1b", "zb-h1"):
            yield Case(*place, schedule, replicas)


def plan_of(case: Case, profile: ModelProfile) -> Plan:
    """Layers cut by their times, as evenly as whole layers allow."""
    groups = case.ranks // case.replicas
    style = FAMILIES[case.schedule].placement
    rounds = 2 if style in ("looped", "folded") else 1
    placement = placement_of_style(style, groups, rounds)
    rows = case.replicas
    bounds = even_cut(profile, len(placement), rows)
    stages = tuple(
        Stage(
            range(lo, hi),
            tuple(range(group * case.replicas, (group + 1) * case.replicas)),
            (1,) * case.replicas,
        )
        for (lo, hi), group in zip(pairwise(bounds), placement, strict=True)
    )
    return Plan(stages, max(8, 2 * (groups // 2)), rows, case.schedule)


def even_cut(profile: ModelProfile, stages: int, rows: int) -> list[int]:
    """The first layer of each stage, and the number of layers: about equal times."""
    seconds = [
        sum(cost.at(rows) for cost in (layer.forward_s, layer.backward_s))
        for layer in profile.layers
    ]
    bounds, done_s, whole_s = [0], 0.0, sum(seconds)
    for layer, spent_s in enumerate(seconds):
        left = stages - len(bounds)
        if (
            left
            and layer > bounds[-1]
            and (
                done_s + spent_s / 2 >= whole_s * len(bounds) / stages
                or len(seconds) - layer <= left
            )
        ):
            bounds.append(layer)
        done_s += spent_s
    return [*bounds, len(seconds)]


def run(case: Case) -> Found:
    """Rehearse one case."""
    profile, cluster = find_profile(case.model), find_cluster(case.cluster)
    plan = plan_of(case, profile)
    emulation = emulation_of(plan, profile, cluster, iterations=ITERATIONS)
    with other_load() as load:
        done = rehearse(emulation)
    return Found(
        case,
        plan.micro_batches,
        emulation.time_scale,
        done.simulated_s,
        done.rehearsed_s,
        done.error,
        done.start_s,
        done.mean_late_s,
        load.cores,
        differences(done),
    )


def table_of(found: Sequence[Found]) -> list[str]:
    """Errors by number of ranks, as Markdown."""
    lines = [
        "| ranks | cases | median error | worst error | start |",
        "|--:|--:|--:|--:|--:|",
    ]
    for ranks in sorted({one.case.ranks for one in found}):
        own = [one for one in found if one.case.ranks == ranks]
        lines.append(
            f"| {ranks} | {len(own)} | {100 * median_error(own):.1f} % | "
            f"{100 * max(abs(one.error) for one in own):.1f} % | "
            f"{statistics.median(one.start_s for one in own):.0f} s |"
        )
    return lines


def median_error(found: Sequence[Found]) -> float:
    """The median of the errors without their signs."""
    return statistics.median(abs(one.error) for one in found)


def read_results(path: Path) -> list[Found]:
    """The results of an earlier run."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return [Found(**(entry | {"case": Case(**entry["case"])})) for entry in document["cases"]]


def main() -> None:
    """Rehearse the cases one after another; go on where an earlier run has ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", type=int, default=0, help="number of ranks")
    parser.add_argument("--cases", type=int, default=1000, help="the most cases to add")
    given = parser.parse_args()
    found = read_results(given.out) if given.out and given.out.exists() else []
    known = {one.case for one in found}
    left = [c for c in cases() if c not in known and given.only in (0, c.ranks)]
    for case in left[: given.cases]:
        try:
            one = run(case)
        except PenstockError as refusal:
            print(f"{case}: {refusal}", flush=True)
            continue
        found.append(one)
        print(
            f"{case}: {100 * one.error:+.2f} %, waits {1e3 * one.mean_late_s:.2f} ms late, others "
            f"used {one.others_cores:.2f} cores, start {one.start_s:.1f} s, {one.differences}",
            flush=True,
        )
        if given.out:
            document = {
                "machine": processor_name(),
                "cores": os.cpu_count(),
                "transport": "shared memory",
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "cases": [asdict(each) for each in found],
            }
            given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table_of(found)))


if __name__ == "__main__":
    main()
