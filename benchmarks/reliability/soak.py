"""Train for hours with a fault a minute; docs/benchmarks/models.md has a run.

    python benchmarks/reliability/soak.py --minutes 120 --out soak.json

Four ranks train `soak.toml`, which waits most of the time, with ``--may-lose 1``. Every minute, or
once it trains again, something breaks. A worker is killed or stopped for 3 seconds; and of every 30
faults the last three are of the run: SIGTERM, a kill, and a kill with the newest checkpoint
damaged. A run that has ended is resumed on four ranks at once. Every 10 seconds is counted what the
run holds; `flatness` judges that. At the end the losses of all steps are compared with those of a
run that nothing broke.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faults import DAMAGES, damage
from flatness import trends_of
from runs import HERE, Place, Run, Start, be_apart, begin, kill_all, place_in, read

from penstock.machine import processor_name

JOB = HERE / "soak.toml"
RANKS = 4
ROUND = 30
"""Faults after which the run itself has been broken in each way."""
RUN_FAULTS = ("terminate", "kill run", "damage checkpoint")
WORKER_FAULTS = ("kill worker", "kill worker", "stop worker for 3 s")
SAMPLE_S = 10.0
FAULT_S = 60.0
ENDS_S = 60.0
"""Seconds in which a run that was ended must have ended."""
JUDGED_MINUTES = 40
"""A shorter soak says nothing about growth."""
DIFFERENCE = 1e-3
"""Losses may differ by so much of the largest: plans for three and four ranks sum differently."""


@dataclass
class Soak:
    """A soak: the run of now, and what was found so far. ``life`` counts its first processes."""

    place: Place
    draw: random.Random
    started_s: float
    run: Run
    life: int = 0
    broken_by: str = ""
    faults: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    flaws: list[str] = field(default_factory=list[str])

    def at_s(self) -> float:
        """Seconds since the beginning."""
        return round(time.monotonic() - self.started_s, 1)


def start(place: Place, *, resume: bool) -> Run:
    """Start or resume the training."""
    options = ("--may-lose", "1", "--steps", "1000000")
    return begin(Start(JOB, RANKS, None, options, resume, as_command=True), place)


def fault_of(number: int, minutes: int, draw: random.Random) -> str:
    """The kind of a fault: at the end of each round those of the run, before of workers."""
    length = min(ROUND, minutes)
    left = length - 1 - number % length
    return RUN_FAULTS[-1 - left] if left < len(RUN_FAULTS) else draw.choice(WORKER_FAULTS)


def strike(soak: Soak, kind: str) -> None:
    """Break the run."""
    victim = ""
    run = soak.run
    match kind:
        case "terminate":
            run.send(signal.SIGTERM)
            victim = "run"
        case "kill run" | "damage checkpoint":
            run.send(signal.SIGKILL)
            run.wait(ENDS_S)
            victim = "run"
            found = soak.place.complete()
            if kind == "damage checkpoint" and len(found) > 1:
                victim = soak.draw.choice(DAMAGES)
                damage(found[-1], victim, soak.draw)
        case _:
            workers = sorted(run.workers())
            if workers:
                victim = "worker"
                chosen = soak.draw.choice(workers)
                with suppress(ProcessLookupError):
                    stop_or_kill(chosen, kind)
    soak.broken_by = kind
    load = round(os.getloadavg()[0], 1)
    soak.faults.append({"at_s": soak.at_s(), "kind": kind, "victim": victim, "load": load})


def stop_or_kill(pid: int, kind: str) -> None:
    """Break a worker."""
    if kind == "kill worker":
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


def resume_if_over(soak: Soak) -> None:
    """Go on with a run that has ended; what is wrong with its end is a flaw."""
    if not soak.run.is_over():
        return
    soak.flaws += [f"{soak.at_s():.0f} s: {flaw}" for flaw in flaws_of_end(soak)]
    if soak.faults:
        soak.faults[-1]["ended"] = soak.run.code
    had_plan = (soak.place.run / "plan.json").exists()
    soak.run = start(soak.place, resume=had_plan)
    soak.life += 1


def flaws_of_end(soak: Soak) -> list[str]:
    """Faults of the end of a run: processes left, steps lost or doubled, a traceback."""
    flaws: list[str] = []
    deadline_s = time.monotonic() + ENDS_S
    while (left := soak.run.everyone()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if left:
        flaws.append(f"{len(left)} processes left after '{soak.broken_by}'")
        kill_all(left)
    text = soak.run.said()
    last = text.splitlines()[-1:]
    allowed = {"terminate": (143,), "kill run": (-9,), "damage checkpoint": (-9,)}
    if soak.run.code not in allowed.get(soak.broken_by, (4,)):
        flaws.append(f"ended with {soak.run.code} after '{soak.broken_by}': {last}")
    if "Traceback" in text:
        flaws.append(f"a traceback after '{soak.broken_by}': {text[-1500:]}")
    steps = list(losses(soak.place))
    if steps != list(range(1, len(steps) + 1)):
        flaws.append(f"steps are missing or recorded twice after '{soak.broken_by}'")
    return flaws


def losses(place: Place) -> dict[int, float]:
    """The recorded loss of each step; a step that was recorded twice is an error."""
    path = place.run / "metrics.jsonl"
    found: dict[int, float] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            row = json.loads(line)
            if row["step"] in found:
                found[-row["step"]] = row["loss"]
            found[row["step"]] = row["loss"]
    return found


def sampled(soak: Soak) -> dict[str, Any]:
    """Resources that the run holds now."""
    run = soak.run
    server = (run.servers() or [0])[0]
    grows = ("metrics.jsonl", "tensorboard")
    files = [path for path in soak.place.run.rglob("*") if not set(grows) & set(path.parts)]
    return {
        "at_s": soak.at_s(),
        "life": soak.life,
        **counted("parent", run.pid),
        **counted("server", server),
        "processes": len(run.everyone()),
        "shared_memory_names": len(list(Path("/dev/shm").iterdir())),
        "temporary_names": len(list(soak.place.temporary.iterdir())),
        "run_bytes": sum(size_of(path) for path in files),
        "steps": run.steps(),
    }


def counted(name: str, pid: int) -> dict[str, int]:
    """Resident memory, open file handles and threads of a process; 0 if there is none."""
    memory = read(f"/proc/{pid}/statm").split()
    return {
        f"{name}_bytes": int(memory[1]) * os.sysconf("SC_PAGESIZE") if memory else 0,
        f"{name}_handles": number_in(f"/proc/{pid}/fd"),
        f"{name}_threads": number_in(f"/proc/{pid}/task"),
    }


def number_in(folder: str) -> int:
    """The number of names in a folder of /proc."""
    with suppress(OSError):
        return len(os.listdir(folder))
    return 0


def size_of(path: Path) -> int:
    """The bytes of a file; 0 if it has gone."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def soaked(soak: Soak, minutes: int) -> None:
    """Let the run train, break it every minute, and count what it holds."""
    next_sample_s, struck_s, written_s, changed = 0.0, 0.0, -1.0, 0.0
    end_s = 60.0 * minutes
    while soak.at_s() < end_s:
        if soak.at_s() >= next_sample_s:
            next_sample_s += SAMPLE_S
            if not soak.run.is_over():
                soak.samples.append(sampled(soak))
        # On a busy machine a run may need longer than a minute to train again.
        due = struck_s + FAULT_S <= soak.at_s() <= end_s - FAULT_S
        if due and written_s > struck_s:
            struck_s = soak.at_s()
            strike(soak, fault_of(len(soak.faults), minutes, soak.draw))
        resume_if_over(soak)
        with suppress(OSError):
            latest = (soak.place.run / "metrics.jsonl").stat().st_mtime
            if latest != changed:
                changed, written_s = latest, soak.at_s()
        if soak.faults:
            still_s = round(soak.at_s() - max(written_s, 0.0), 1)
            soak.faults[-1]["still_s"] = max(still_s, soak.faults[-1].get("still_s", 0.0))
        time.sleep(0.2)


def ended(soak: Soak) -> None:
    """End the run by SIGTERM, and look at what is left."""
    soak.run.send(signal.SIGTERM)
    soak.run.wait(2 * ENDS_S)
    soak.broken_by = "terminate"
    soak.flaws += [f"at the end: {flaw}" for flaw in flaws_of_end(soak)]
    if left := [path.name for path in soak.place.temporary.iterdir()]:
        soak.flaws.append(f"left in TMPDIR: {left}")
    if left := [path.name for path in Path("/dev/shm").iterdir()]:
        soak.flaws.append(f"left in /dev/shm: {left}")


def largest_difference(place: Place, folder: Path) -> float:
    """Distance of losses from those of a run without faults, as a fraction of the largest."""
    broken = losses(place)
    whole = place_in(folder / "whole")
    os.environ["PENSTOCK_SOAK_STEP_S"] = "0"
    run = begin(
        Start(JOB, RANKS, None, ("--steps", str(max(broken))), as_command=True),
        whole,
    )
    run.wait(3600)
    expected = losses(whole)
    if run.code or expected.keys() != broken.keys():
        raise SystemExit(f"the run without faults failed: {run.said()}")
    return max(abs(broken[step] - loss) for step, loss in expected.items()) / max(expected.values())


def written(soak: Soak, minutes: int, difference: float | None, path: Path) -> Sequence[str]:
    """Write the results; what is wrong with them."""
    trends = trends_of(soak.samples)
    flaws = list(soak.flaws)
    if minutes >= JUDGED_MINUTES:
        flaws += [f"{trend.name} grows" for trend in trends if not trend.is_flat]
    if difference is not None and difference > DIFFERENCE:
        flaws.append(f"losses differ by {difference:.1e} of the largest")
    document = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": processor_name(),
        "cores": os.cpu_count(),
        "minutes": minutes,
        "steps": len(losses(soak.place)),
        "largest_difference_of_losses": difference,
        "flaws": flaws,
        "trends": [asdict(trend) for trend in trends],
        "faults": soak.faults,
        "samples": soak.samples,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return flaws


def main() -> None:
    """Run the soak; ends with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Train for hours with a fault a minute.")
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    be_apart()
    folder = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    place = place_in(folder / "soak")
    began_s = time.monotonic()
    soak = Soak(place, random.Random(chosen.seed), began_s, start(place, resume=False))
    try:
        soaked(soak, chosen.minutes)
        ended(soak)
        written(soak, chosen.minutes, None, chosen.out)
        difference = largest_difference(place, folder)
        flaws = written(soak, chosen.minutes, difference, chosen.out)
    finally:
        kill_all(soak.run.everyone())
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(flaws) or "nothing is wrong")
    sys.exit(bool(flaws))


if __name__ == "__main__":
    main()
