"""Break runs at random and resume them; docs/benchmarks/reliability.md has a campaign.

    python benchmarks/reliability/chaos.py --count 50 --seed 1 --out chaos.json

Each fault hits a run of `tiny.toml` on 2 to 4 ranks, in a phase drawn by the seed. Then the run is
resumed, or started again where it had no plan yet. `flaws_of_end` and `flaws_of_resumed` say what
is asked of both. With root's rights, disks of a few megabytes are mounted in a namespace of its
own, to fill them; without, that fault is left out. A file that exists gets the new faults added.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
JOB = HERE / "tiny.toml"
STEPS, LAYERS = 30, 5
"""Of the job of `tiny.toml`."""
DISK_BYTES = 96 << 20
MARK = "PENSTOCK_CHAOS"
"""Environment variable by which the processes of a run are found."""

DEADLINE_S = 120.0
STOPPED_DEADLINE_S = 300.0
"""Seconds in which a broken run must have ended; the latter where a process is stopped."""
RESUMED_LIMIT_S = 400.0
GONE_S = 60.0
"""Seconds in which the last process of a run must be gone once its first has ended."""
VICTIM_S = 20.0
"""Seconds in which there must be a process to hit."""
LONGEST_LINE = 600

PHASES = ("start", "measure", "plan", "workers", "steps", "checkpoint", "end")
KINDS = (
    *("kill run", "kill worker", "kill worker", "kill server", "terminate", "interrupt"),
    *("stop worker for 3 s", "stop worker", "fill disk", "damage checkpoint", "limit memory"),
)
DAMAGES = ("cut", "flip", "empty", "remove", "no state", "cut state")


@dataclass
class Fault:
    """A fault, and what came of it; ``flaws`` is empty if all was as it should be."""

    seed: int
    kind: str
    phase: str
    ranks: int
    victim: str = ""
    code: int | None = None
    ended_s: float = 0.0
    message: str = ""
    said: str = ""
    outcome: str = ""
    resumed_s: float = 0.0
    flaws: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Place:
    """The directories of one run: ``disk`` holds the run, ``temporary`` is its TMPDIR."""

    disk: Path
    temporary: Path
    errors: Path

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.disk / "run"

    @property
    def checkpoints(self) -> Path:
        """The run's checkpoints."""
        return self.run / "checkpoints"


@dataclass(frozen=True)
class Run:
    """A training that has been started."""

    process: subprocess.Popen[bytes]
    place: Place
    mark: str

    def said(self) -> str:
        """What it has printed so far."""
        return self.place.errors.read_text(errors="replace")

    def steps(self) -> int:
        """How many steps it has recorded."""
        path = self.place.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def writes_checkpoint(self) -> bool:
        """Whether a checkpoint is half written."""
        return any(self.place.checkpoints.glob(".step-*.partial"))

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def everyone(self) -> list[int]:
        """Its processes, the first one too, without zombies."""
        return [pid for pid in marked(self.mark) if not is_zombie(pid)]

    def workers(self) -> list[int]:
        """Its workers: forks of the fork server, which has their command line."""
        served = [pid for pid in self.everyone() if b"forkserver" in read(f"/proc/{pid}/cmdline")]
        return [pid for pid in served if parent_of(pid) in served]

    def servers(self) -> list[int]:
        """The fork server."""
        served = [pid for pid in self.everyone() if b"forkserver" in read(f"/proc/{pid}/cmdline")]
        return [pid for pid in served if parent_of(pid) == self.process.pid]


def read(path: str) -> bytes:
    """A file of /proc; empty if its process has ended."""
    with suppress(OSError):
        return Path(path).read_bytes()
    return b""


def marked(mark: str) -> Iterator[int]:
    """The processes that have a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for found in Path("/proc").glob("[0-9]*/environ"):
        if wanted in read(str(found)).split(b"\0"):
            yield int(found.parent.name)


def stat_of(pid: int) -> list[bytes]:
    """State and parent of a process."""
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:2] or [b"Z", b"0"]


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, and only its number is left."""
    return stat_of(pid)[0] == b"Z"


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(stat_of(pid)[1])


def start(place: Place, ranks: int, plan: Path | None, *, resume: bool) -> Run:
    """Start a training, or resume it."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "train", str(JOB)]
    command += ["--workers", str(ranks), "-o", str(place.run)]
    command += ["--plan", str(plan)] if plan else []
    command += ["--resume"] if resume else []
    environment = {**os.environ, MARK: mark, "TMPDIR": str(place.temporary)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(place.errors.with_name("inductor"))
    with place.errors.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )
    return Run(process, place, mark)


def reached(run: Run, phase: str, draw: random.Random) -> bool:
    """Wait for a phase and then some moments; false if the run ended before."""
    ready: Mapping[str, Callable[[], bool]] = {
        "start": lambda: True,
        "measure": lambda: "measuring" in run.said(),
        "plan": lambda: "planning" in run.said(),
        "workers": lambda: "starting" in run.said(),
        "steps": lambda: run.steps() >= draw_steps,
        "checkpoint": lambda: run.steps() >= draw_steps and run.writes_checkpoint(),
        "end": lambda: (run.place.checkpoints / f"step-{STEPS:08d}").exists(),
    }
    draw_steps = draw.randint(1, STEPS - 5)
    moments = {"start": 6.0, "measure": 8.0, "plan": 2.0, "workers": 6.0, "checkpoint": 0.02}
    deadline_s = time.monotonic() + RESUMED_LIMIT_S
    while not ready[phase]():
        if run.is_over() or time.monotonic() > deadline_s:
            return False
        time.sleep(0.001 if phase == "checkpoint" else 0.02)
    time.sleep(draw.random() * moments.get(phase, 0.3))
    return not run.is_over()


def strike(run: Run, fault: Fault, draw: random.Random) -> None:
    """Do to a run what the fault says."""
    match fault.kind:
        case "kill run" | "damage checkpoint":
            signalled(run, fault, [run.process.pid], signal.SIGKILL)
        case "terminate":
            signalled(run, fault, [run.process.pid], signal.SIGTERM)
        case "interrupt":
            signalled(run, fault, [run.process.pid], signal.SIGINT)
        case "kill worker":
            signalled(run, fault, one_of(run.workers, draw), signal.SIGKILL)
        case "kill server":
            signalled(run, fault, one_of(run.servers, draw), signal.SIGKILL)
        case "stop worker":
            signalled(run, fault, one_of(run.workers, draw), signal.SIGSTOP)
        case "stop worker for 3 s":
            victims = one_of(run.workers, draw)
            signalled(run, fault, victims, signal.SIGSTOP)
            time.sleep(3)
            signalled(run, fault, victims, signal.SIGCONT)
        case "limit memory":
            for pid in one_of(run.workers, draw):
                with suppress(OSError, ValueError):
                    used = int(read(f"/proc/{pid}/statm").split()[5]) * resource.getpagesize()
                    resource.prlimit(pid, resource.RLIMIT_DATA, (used, used))
                    fault.victim = name_of(run, pid)
        case "fill disk":
            fill(run.place.disk / "filler")
            fault.victim = "disk"
        case _:
            raise ValueError(fault.kind)


def one_of(look: Callable[[], list[int]], draw: random.Random) -> list[int]:
    """One of some processes, as soon as there are any; none if none come."""
    deadline_s = time.monotonic() + VICTIM_S
    while time.monotonic() < deadline_s:
        if pids := look():
            return [draw.choice(sorted(pids))]
        time.sleep(0.02)
    return []


def signalled(run: Run, fault: Fault, pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal."""
    for pid in pids:
        with suppress(ProcessLookupError):
            name = name_of(run, pid)
            os.kill(pid, number)
            fault.victim = name


def name_of(run: Run, pid: int) -> str:
    """What a process is to its run."""
    if pid == run.process.pid:
        return "run"
    return "worker" if pid in run.workers() else "server"


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


def finished(run: Run, limit_s: float) -> float:
    """Wait for the end of a run and of its processes; the seconds it took, at most ``limit_s``."""
    start_s = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(limit_s)
    return time.monotonic() - start_s


def flaws_of_end(run: Run, fault: Fault, before: Sequence[str]) -> Iterator[str]:
    """What is wrong with the end of a broken run; ``before`` are the checkpoints it had."""
    if run.process.poll() is None:
        yield "did not end in time"
    deadline_s = time.monotonic() + GONE_S
    while (left := run.everyone()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if left:
        commands = [read(f"/proc/{pid}/cmdline").replace(b"\0", b" ")[-60:] for pid in left]
        yield f"{len(left)} processes left: {commands[0].decode(errors='replace')}"
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    fault.code = run.process.returncode
    text = run.said()
    lines = [line for line in text.splitlines() if line.startswith("penstock: ")]
    fault.message = lines[-1] if lines else ""
    if "Traceback" in text:
        yield "a traceback was printed"
        fault.said = text[max(0, text.index("Traceback") - 300) :][:1500]
    was_killed = fault.code == -signal.SIGKILL
    if fault.code and not was_killed and not lines and fault.kind != "terminate":
        yield f"ended with {fault.code} without a message"
    if len(fault.message) > LONGEST_LINE:
        yield f"a message of {len(fault.message)} characters"
    if before and not any(path.name >= before[-1] for path in complete(run.place)):
        yield f"checkpoint {before[-1]} is lost"
    if not was_killed and (left_over := left_in(run, fault)):
        yield f"left in TMPDIR: {left_over[0]}"
    if shared := shared_memory():
        yield f"left in /dev/shm: {shared[0]}"


def flaws_of_resumed(run: Run, fault: Fault, expected: Mapping[str, bytes]) -> Iterator[str]:
    """What is wrong with a resumed run; ``expected`` are the tensors of an unbroken one."""
    if run.process.poll() is None:
        run.process.kill()
        run.process.wait()
        yield "the resumed run did not end in time"
        return
    if run.process.returncode:
        yield f"resuming ended with {run.process.returncode}: {run.said().splitlines()[-1:]}"
        return
    rows = (run.place.run / "metrics.jsonl").read_text().splitlines()
    if [json.loads(row)["step"] for row in rows] != list(range(1, STEPS + 1)):
        yield "steps are missing or recorded twice"
    if expected and tensors_of(run.place) != expected:
        yield "weights differ from an unbroken run's"
    if left_over := left_in(run, fault):
        yield f"left in TMPDIR after resuming: {left_over[0]}"
    if shared := shared_memory():
        yield f"left in /dev/shm after resuming: {shared[0]}"


def left_in(run: Run, fault: Fault) -> list[str]:
    """What is left in the temporary directory, without tracebacks to which the message points."""
    names = [path.name for path in run.place.temporary.iterdir()]
    return [name for name in names if name not in fault.message]


def shared_memory() -> list[str]:
    """The names in /dev/shm."""
    return sorted(path.name for path in Path("/dev/shm").iterdir())


def complete(place: Place) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted(place.checkpoints.glob("step-*"))


def tensors_of(place: Place) -> dict[str, bytes]:
    """Every tensor of the last checkpoint by name, as bytes: weights, optimizer, random numbers."""
    import torch

    from penstock.runtime.weights.safetensors_file import plain_bytes, read_header, read_into

    found: dict[str, bytes] = {}
    for file in sorted((place.checkpoints / f"step-{STEPS:08d}").glob("*.safetensors")):
        for name, stored in read_header(file).items():
            tensor = torch.empty(stored.shape, dtype=stored.dtype)
            read_into(stored, tensor)
            found[name] = plain_bytes(tensor).tobytes()
    return found


def plan_for(ranks: int, folder: Path) -> Path:
    """A plan of this many ranks: stages, and from three ranks on replicas."""
    from penstock.plan.json_file import write_plan
    from penstock.plan.plan import Plan, Stage

    stages = {
        2: (Stage(range(0, 2), (0,), (4,)), Stage(range(2, LAYERS), (1,), (4,))),
        3: (Stage(range(0, 2), (0, 1), (2, 2)), Stage(range(2, LAYERS), (2,), (4,))),
        4: (Stage(range(0, 2), (0, 1), (3, 1)), Stage(range(2, LAYERS), (2, 3), (2, 2))),
    }
    path = folder / f"plan-{ranks}.json"
    write_plan(Plan(stages[ranks], 4, 4, "1f1b" if ranks < 4 else "gpipe"), path)
    return path


@dataclass(frozen=True)
class Unbroken:
    """A run that nothing happened to: its plan, its measured costs and its last tensors."""

    plan: Path
    costs: Path
    tensors: Mapping[str, bytes]


def unbroken(ranks: int, folder: Path) -> Unbroken:
    """Train once without a fault."""
    place = place_in(folder / f"unbroken-{ranks}")
    plan = plan_for(ranks, folder)
    run = start(place, ranks, plan, resume=False)
    finished(run, RESUMED_LIMIT_S)
    assert run.process.returncode == 0, run.said()
    slow_down(place.run)
    return Unbroken(plan, place.run, tensors_of(place))


def slow_down(run: Path) -> None:
    """Make measured costs a hundredfold, so that no busy core seems slower than planned."""
    from penstock.cluster.toml_file import read_cluster, write_cluster

    profile = json.loads((run / "profile.json").read_text())
    for layer in profile["layers"]:
        for figure in ("forward_s", "backward_input_s", "backward_weight_s"):
            layer[figure] = {key: 100 * value for key, value in layer[figure].items()}
    (run / "profile.json").write_text(json.dumps(profile))
    cluster = read_cluster(run / "cluster.toml")
    hosts = tuple(
        replace(host, link_bytes_per_s=host.link_bytes_per_s / 100) for host in cluster.hosts
    )
    write_cluster(replace(cluster, hosts=hosts), run / "cluster.toml")


def place_in(folder: Path) -> Place:
    """New directories for a run."""
    place = Place(folder / "disk", folder / "temporary", folder / "errors")
    for made in (place.disk, place.temporary):
        made.mkdir(parents=True)
    return place


def try_fault(fault: Fault, expected: Unbroken, folder: Path) -> None:
    """Start a run, break it, resume it; what came of it is written into ``fault``."""
    draw = random.Random(fault.seed)
    place = place_in(folder)
    if fault.kind == "fill disk":
        mounted = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place.disk)]
        subprocess.run(mounted, check=True)
    if fault.phase != "measure":
        place.run.mkdir()
        for name in ("profile.json", "cluster.toml"):
            shutil.copy(expected.costs / name, place.run)
    plan = None if fault.phase == "plan" else expected.plan
    run = start(place, fault.ranks, plan, resume=False)
    hit = reached(run, fault.phase, draw)
    before = [path.name for path in complete(place)]
    if hit:
        strike(run, fault, draw)
    limit_s = STOPPED_DEADLINE_S if fault.kind == "stop worker" else DEADLINE_S
    fault.ended_s = round(finished(run, limit_s), 1)
    fault.flaws = list(flaws_of_end(run, fault, before))
    (place.disk / "filler").unlink(missing_ok=True)
    found = complete(place)
    if fault.kind == "damage checkpoint" and len(found) > 1:
        fault.victim = draw.choice(DAMAGES)
        damage(found[-1], fault.victim, draw)
    if fault.code == 0:
        fault.outcome = "went on to its end" if fault.victim else "had ended before"
    else:
        resume(fault, expected, place, plan)
    if fault.kind == "fill disk":
        subprocess.run(["umount", str(place.disk)], check=False)


def resume(fault: Fault, expected: Unbroken, place: Place, plan: Path | None) -> None:
    """Go on with a broken run, or start it again if it had no plan yet."""
    had_plan = (place.run / "plan.json").exists()
    had_checkpoint = bool(complete(place))
    resumed = start(place, fault.ranks, plan, resume=had_plan)
    fault.resumed_s = round(finished(resumed, RESUMED_LIMIT_S), 1)
    tensors = expected.tensors if plan else {}
    fault.flaws += flaws_of_resumed(resumed, fault, tensors)
    fault.outcome = "resumed" if had_checkpoint else "started again"
    if "is left out" in resumed.said():
        fault.outcome = "resumed from an older checkpoint"


def drawn(seed: int, kinds: Sequence[str]) -> Fault:
    """The fault of a seed."""
    draw = random.Random(f"fault {seed}")
    kind = draw.choice(kinds)
    phases = PHASES if kind != "damage checkpoint" else ("steps", "checkpoint", "end")
    return Fault(seed, kind, draw.choice(phases), draw.randint(2, 4))


def main() -> None:
    """Read the options, break runs, write what came of each."""
    options = argparse.ArgumentParser(description="Break runs at random and resume them.")
    options.add_argument("--count", type=int, default=10, help="number of faults")
    options.add_argument("--seed", type=int, default=1, help="seed of the first fault")
    options.add_argument("--only", nargs="*", default=list(dict.fromkeys(KINDS)), help="kinds")
    options.add_argument("--out", type=Path, help="JSON file to which the faults are added")
    chosen = options.parse_args()
    is_root = os.geteuid() == 0
    if is_root and "PENSTOCK_CHAOS_APART" not in os.environ:
        os.environ["PENSTOCK_CHAOS_APART"] = "1"
        command = ["unshare", "--mount", sys.executable, *sys.argv]
        os.execvp(command[0], command)
    if is_root:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    kinds = [kind for kind in KINDS if kind in chosen.only and (is_root or kind != "fill disk")]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as made:
        known: dict[int, Unbroken] = {}
        for seed in range(chosen.seed, chosen.seed + chosen.count):
            fault = drawn(seed, kinds)
            if fault.ranks not in known:
                known[fault.ranks] = unbroken(fault.ranks, Path(made))
            folder = Path(made) / f"fault-{seed}"
            try_fault(fault, known[fault.ranks], folder)
            shutil.rmtree(folder, ignore_errors=True)
            failed += bool(fault.flaws)
            print(json.dumps(asdict(fault)), flush=True)
            if chosen.out:
                add(fault, chosen.out)
    sys.exit(bool(failed))


def add(fault: Fault, path: Path) -> None:
    """Add a fault to the results, with date and machine."""
    faults = json.loads(path.read_text())["faults"] if path.exists() else []
    faults = [known for known in faults if known["seed"] != fault.seed]
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "cores": os.cpu_count(),
        "faults": sorted([*faults, asdict(fault)], key=lambda found: found["seed"]),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> str:
    """The name of the processor."""
    for line in read("/proc/cpuinfo").decode().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
