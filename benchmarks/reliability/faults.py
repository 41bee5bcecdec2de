"""Faults: what breaks a run, when, and how that is done."""

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from runs import Run, in_network_of, read

STEPS = 30
"""Of the job of `tiny.toml`."""

EVALUATED = 10
"""The step after which that job evaluates first."""

PHASES = ("start", "measure", "plan", "workers", "steps", "checkpoint", "evaluation", "end")
WEIGHTS = (2, 1, 1, 3, 4, 4, 2, 1)
"""The phases, and how often each is drawn."""

KINDS = (
    *("kill run", "kill worker", "kill worker", "kill server", "terminate", "interrupt"),
    *("stop worker for 3 s", "stop worker", "fill disk", "damage checkpoint", "limit memory"),
    *("cut link", "cut link for 5 s", "slow link", "error of the user's"),
)
DAMAGES = ("cut", "flip", "empty", "remove", "no state", "cut state")
RATES = ("10mbit", "50mbit", "200mbit")
"""Of a slow link."""

REACHED_S = 400.0
"""Seconds in which a run must reach a phase."""
VICTIM_S = 60.0
"""Seconds in which there must be a process to hit."""

Transport: TypeAlias = Literal["shared memory", "process groups"]
TRANSPORTS: tuple[Transport, ...] = ("shared memory", "process groups")


@dataclass
class Fault:
    """A fault, and what came of it; ``flaws`` is empty if all was as it should be."""

    seed: int
    kind: str
    phase: str
    ranks: int
    transport: Transport = "shared memory"
    victim: str = ""
    code: int | None = None
    ended_s: float = 0.0
    message: str = ""
    said: str = ""
    outcome: str = ""
    resumed_s: float = 0.0
    flaws: list[str] = field(default_factory=list[str])


def drawn(seed: int, kinds: Sequence[str]) -> Fault:
    """The fault of a seed."""
    draw = random.Random(f"fault {seed}")
    kind = draw.choice(kinds)
    phase = draw.choices(PHASES, WEIGHTS)[0]
    if kind == "damage checkpoint":
        phase = draw.choice(("steps", "checkpoint", "end"))
    transport = draw.choice(TRANSPORTS)
    return Fault(seed, kind, phase, draw.randint(2, 6), transport)


def needs_root(kind: str) -> bool:
    """Return whether a fault needs a disk or a network of the run's own."""
    return kind == "fill disk" or "link" in kind


def reached(run: Run, phase: str, draw: random.Random) -> bool:
    """Wait for a phase and then some moments; false if the run ended before."""
    step = draw.randint(1, STEPS - 5)
    ready: Mapping[str, Callable[[], bool]] = {
        "start": lambda: True,
        "measure": lambda: "measuring" in run.said(),
        "plan": lambda: "planning" in run.said(),
        "workers": lambda: "plan: " in run.said(),
        "steps": lambda: run.steps() >= step,
        "checkpoint": lambda: run.steps() >= step and run.writes_checkpoint(),
        "evaluation": lambda: run.steps() >= EVALUATED,
        "end": lambda: (run.place.checkpoints / f"step-{STEPS:08d}").exists(),
    }
    moments = {"start": 6.0, "measure": 8.0, "plan": 2.0, "workers": 6.0, "checkpoint": 0.02}
    # An evaluation reads two batches.
    moments["evaluation"] = 0.12
    deadline_s = time.monotonic() + REACHED_S
    while not ready[phase]():
        if run.is_over() or time.monotonic() > deadline_s:
            return False
        time.sleep(0.002 if phase == "checkpoint" else 0.02)
    time.sleep(draw.random() * moments.get(phase, 0.3))
    return not run.is_over()


def strike(run: Run, fault: Fault, draw: random.Random) -> None:
    """Do to a run what the fault says; ``fault.victim`` is what was hit."""
    match fault.kind:
        case "kill run" | "damage checkpoint":
            signalled(run, fault, [run.pid], signal.SIGKILL)
        case "terminate":
            signalled(run, fault, [run.pid], signal.SIGTERM)
        case "interrupt":
            signalled(run, fault, [run.pid], signal.SIGINT)
        case "kill worker":
            signalled(run, fault, one_of(run, run.workers, draw), signal.SIGKILL)
        case "kill server":
            signalled(run, fault, one_of(run, run.servers, draw), signal.SIGKILL)
        case "stop worker":
            signalled(run, fault, one_of(run, run.workers, draw), signal.SIGSTOP)
        case "stop worker for 3 s":
            victims = one_of(run, run.workers, draw)
            signalled(run, fault, victims, signal.SIGSTOP)
            time.sleep(3)
            signalled(run, fault, victims, signal.SIGCONT)
        case "limit memory":
            limit_memory(run, fault, one_of(run, run.workers, draw))
        case "error of the user's":
            run.place.error.touch()
            fault.victim = "data"
        case "fill disk":
            fill(run.place.disk / "filler")
            fault.victim = "disk"
        case "cut link" | "cut link for 5 s" | "slow link":
            strike_link(run, fault, draw)
        case _:
            raise ValueError(fault.kind)


def strike_link(run: Run, fault: Fault, draw: random.Random) -> None:
    """Cut the network of a run, for good or for 5 seconds, or make it slow."""
    if fault.kind == "slow link":
        rate = draw.choice(RATES)
        queue = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        if in_network_of(run.pid, "tc", "qdisc", "add", "dev", "lo", "root", *queue):
            fault.victim = f"link, {rate}"
        return
    if in_network_of(run.pid, "ip", "link", "set", "lo", "down"):
        fault.victim = "link"
    if fault.kind == "cut link for 5 s":
        time.sleep(5)
        in_network_of(run.pid, "ip", "link", "set", "lo", "up")


def one_of(run: Run, look: Callable[[], list[int]], draw: random.Random) -> list[int]:
    """One of some processes, as soon as there are any; none if none come."""
    deadline_s = time.monotonic() + VICTIM_S
    while time.monotonic() < deadline_s and not run.is_over():
        if pids := look():
            return [draw.choice(sorted(pids))]
        time.sleep(0.02)
    return []


def signalled(run: Run, fault: Fault, pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal."""
    for pid in pids:
        with suppress(ProcessLookupError):
            name = run.name_of(pid)
            os.kill(pid, number)
            fault.victim = name


def limit_memory(run: Run, fault: Fault, pids: Sequence[int]) -> None:
    """Let processes allocate no more than they have."""
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            used = int(read(f"/proc/{pid}/statm").split()[5]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_DATA, (used, used))
            fault.victim = run.name_of(pid)


def mount_disk(path: Path, size_bytes: int) -> None:
    """Mount a small disk, which `fill` can fill."""
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    subprocess.run(mounted, check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def damage(path: Path, how: str, draw: random.Random) -> None:
    """Damage a checkpoint."""
    file = draw.choice(sorted(path.glob("*.safetensors")))
    state = path / "state.json"
    data = file.read_bytes()
    match how:
        case "cut":
            file.write_bytes(data[: draw.randrange(len(data))])
        case "flip":
            place = draw.randrange(len(data))
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        case "empty":
            file.write_bytes(b"")
        case "remove":
            file.unlink()
        case "no state":
            state.unlink()
        case _:
            text = state.read_bytes()
            state.write_bytes(text[: draw.randrange(len(text))])
