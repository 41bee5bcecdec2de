"""Break runs at random and resume them; docs/benchmarks/models.md has a campaign.

    python benchmarks/reliability/chaos.py --count 50 --seed 1 --parallel 2 --out chaos.json

Each fault hits a run of `tiny.toml` on 2 to 6 ranks, in a phase and over a transport drawn by the
seed. Then the run is resumed, or started again where it had no plan yet. `verdict` says what is
asked of both. A fault that hits nothing, because the run had ended before, does not count: the next
seed is taken. With root's rights, disks of a few megabytes and networks are made in namespaces, to
fill and to cut them; without, those faults are left out. A file that exists gets the new faults
added.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from faults import (
    DAMAGES,
    KINDS,
    Fault,
    Transport,
    damage,
    drawn,
    mount_disk,
    needs_root,
    reached,
    strike,
)
from runs import Place, Run, Start, be_apart, begin, kill_all, place_in
from unbroken import COSTS, JOB, Unbroken, unbroken
from verdict import clean_up_after, flaws_of_end, flaws_of_resumed

from penstock.machine import processor_name

DISK_BYTES = 96 << 20

DEADLINE_S = 120.0
SLOW_DEADLINE_S = 300.0
"""Seconds in which a broken run must have ended; the latter where it may go on for a while."""
MAY_GO_ON = ("stop worker", "stop worker for 3 s", "fill disk", "limit memory")
RESUMED_LIMIT_S = 400.0


def try_fault(fault: Fault, expected: Unbroken, folder: Path) -> None:
    """Start a run, break it, resume it; what came of it is written into ``fault``."""
    draw = random.Random(fault.seed)
    place = place_in(folder)
    if fault.kind == "fill disk":
        mount_disk(place.disk, DISK_BYTES)
    if fault.phase != "measure":
        place.run.mkdir()
        for name in COSTS:
            shutil.copy(expected.costs / name, place.run)
    start = Start(
        JOB,
        fault.ranks,
        None if fault.phase == "plan" else expected.plan,
        own_hosts=fault.transport == "process groups",
        own_network="link" in fault.kind,
        # Only this phase contains the imports.
        as_command=fault.phase == "start",
    )
    run = begin(start, place)
    hit = reached(run, fault.phase, draw)
    before = [path.name for path in place.complete()]
    if hit:
        strike(run, fault, draw)
    if not fault.victim:
        hit_nothing(run, fault)
        return
    slow = fault.kind in MAY_GO_ON or "link" in fault.kind
    fault.ended_s = round(run.wait(SLOW_DEADLINE_S if slow else DEADLINE_S), 1)
    fault.flaws = list(flaws_of_end(run, fault, before))
    (place.disk / "filler").unlink(missing_ok=True)
    place.error.unlink(missing_ok=True)
    found = place.complete()
    if fault.kind == "damage checkpoint" and len(found) > 1:
        fault.victim = draw.choice(DAMAGES)
        damage(found[-1], fault.victim, draw)
    if fault.code == 0:
        fault.outcome = "went on to its end"
    else:
        resume(fault, expected, place, start.plan)


def hit_nothing(run: Run, fault: Fault) -> None:
    """End a run that the fault has missed; it must not have ended with an error of its own."""
    fault.outcome = "hit nothing"
    if run.is_over() and run.code:
        fault.code = run.code
        fault.flaws.append(f"ended with {run.code} without a fault: {run.said()[-300:]}")
    kill_all(run.everyone())
    run.wait(DEADLINE_S)
    clean_up_after(run)


def resume(fault: Fault, expected: Unbroken, place: Place, plan: Path | None) -> None:
    """Go on with a broken run, or start it again if it had no plan yet."""
    had_plan = (place.run / "plan.json").exists()
    had_checkpoint = bool(place.complete())
    own_hosts = fault.transport == "process groups"
    resumed = begin(Start(JOB, fault.ranks, plan, (), had_plan, own_hosts), place)
    fault.resumed_s = round(resumed.wait(RESUMED_LIMIT_S), 1)
    tensors = expected.tensors if plan else {}
    fault.flaws += flaws_of_resumed(resumed, fault, tensors)
    fault.outcome = "resumed" if had_checkpoint else "started again"
    if "steps already" in resumed.said():
        fault.outcome = "resumed, but had taken all steps"
    if "is left out" in resumed.said():
        fault.outcome = "resumed from an older checkpoint"


def campaign(chosen: argparse.Namespace, kinds: Sequence[str], folder: Path) -> int:
    """Break runs until enough faults have hit something, or time is over; the runs with flaws."""
    known: dict[tuple[int, Transport], Unbroken] = {}
    hits, failed, seed = 0, 0, chosen.seed
    end_s = time.monotonic() + 60 * chosen.minutes if chosen.minutes else float("inf")
    while hits < chosen.count and time.monotonic() < end_s:
        fault = drawn(seed, kinds)
        seed += chosen.every
        key = fault.ranks, fault.transport
        if key not in known:
            known[key] = unbroken(*key, folder)
        place = folder / f"fault-{fault.seed}"
        try_fault(fault, known[key], place)
        if fault.kind == "fill disk":
            subprocess.run(["umount", str(place / "disk")], check=False)
        shutil.rmtree(place, ignore_errors=True)
        print(json.dumps(asdict(fault)), flush=True)
        hits += bool(fault.victim)
        failed += bool(fault.flaws)
        if chosen.out and (fault.victim or fault.flaws):
            add(fault, chosen.out)
    return failed


def in_parallel(chosen: argparse.Namespace) -> int:
    """Let several processes of this script each take some of the seeds."""
    started = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--seed", str(chosen.seed + number)),
                *("--every", str(chosen.parallel), "--minutes", str(chosen.minutes)),
                *("--count", str(-(-chosen.count // chosen.parallel)), "--only", *chosen.only),
                *(["--out", str(chosen.out)] if chosen.out else []),
            ]
        )
        for number in range(chosen.parallel)
    ]
    return sum(process.wait() != 0 for process in started)


def options() -> argparse.Namespace:
    """The options of the script."""
    parser = argparse.ArgumentParser(description="Break runs at random and resume them.")
    parser.add_argument("--count", type=int, default=10, help="number of faults that hit")
    parser.add_argument("--minutes", type=float, default=0, help="start none after so long")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first fault")
    parser.add_argument("--every", type=int, default=1, help="distance of one seed to the next")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="*", default=list(dict.fromkeys(KINDS)), help="kinds")
    parser.add_argument("--out", type=Path, help="JSON file to which the faults are added")
    return parser.parse_args()


def main() -> None:
    """Read the options, break runs, write what came of each."""
    chosen = options()
    if chosen.parallel > 1:
        sys.exit(bool(in_parallel(chosen)))
    be_apart()
    is_root = os.geteuid() == 0
    kinds = [kind for kind in KINDS if kind in chosen.only and (is_root or not needs_root(kind))]
    # The runs are forked from this process, so that not each of them has to import torch.
    import penstock.commands.job_commands
    import penstock.train.rank_program
    import penstock.train.train  # noqa: F401

    # Not a TemporaryDirectory: a fork would remove it at its end.
    folder = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    try:
        failed = campaign(chosen, kinds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(failed))


def add(fault: Fault, path: Path) -> None:
    """Add a fault to the results, with date and machine."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        faults = json.loads(path.read_text())["faults"] if path.exists() else []
        faults = [known for known in faults if known["seed"] != fault.seed]
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": processor_name(),
            "cores": os.cpu_count(),
            "faults": sorted([*faults, asdict(fault)], key=lambda found: found["seed"]),
        }
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
