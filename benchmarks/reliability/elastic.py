"""Pause of a script under torchrun's elastic agent that loses a worker or a host.

    python benchmarks/reliability/elastic.py [--runs 3] --out elastic.json

Each run trains `examples/elastic_loop.py` on four ranks. In "worker" one rank is killed. In "host"
there are two agents with two ranks each, in namespaces of their own where that is allowed. One is
killed with all its processes; later an agent is started in its place. The seconds count from the
kill, or from the start of that agent, to the first step after it. The losses of all steps are
compared with those of a run that nothing disturbed.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic_loop.py"
PACED = Path(__file__).with_name("paced.py")
TORCHRUN = Path(sys.executable).with_name("torchrun")
LIMIT_S = 900.0
LOOK_EVERY_S = 0.01
STEPS_OF_AN_EPOCH = 20
ELASTIC = "keep_alive_interval=1,last_call_timeout=3"
"""Settings of the rendezvous: a host is given up after three intervals, and others waited for."""


@dataclass
class Segment:
    """Output of the ranks of one start: their number, and the loss of each step."""

    ranks: int
    after: int
    losses: dict[int, float] = field(default_factory=dict)


def segments(logs: Sequence[Path]) -> list[Segment]:
    """The starts of a run. If hosts come and go, each start's rank 0 is on one of them."""
    found: list[Segment] = []
    for line in "".join(log.read_text() for log in logs if log.exists()).splitlines():
        if match := re.fullmatch(r"(\d+) ranks go on after step (\d+)", line):
            found.append(Segment(int(match[1]), int(match[2])))
        elif match := re.fullmatch(r"step (\d+): loss (\S+)", line):
            found[-1].losses[int(match[1])] = float(match[2])
    return found


def losses(found: Sequence[Segment]) -> dict[int, float]:
    """The loss of each step, as the last start took it."""
    return {step: loss for segment in found for step, loss in segment.losses.items()}


def agent(
    arguments: Sequence[object], log: Path, *, prefix: Sequence[str] | None = None
) -> "subprocess.Popen[str]":
    """An agent of torchrun; what its ranks print goes to ``log``, the rest to a file beside it."""
    # Otherwise the first agent does not tell one that comes later where the store is.
    alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if prefix is not None else {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | alone
    with log.open("a") as out, log.with_suffix(".err").open("a") as err:
        return subprocess.Popen(
            [*(prefix or ()), str(TORCHRUN), *map(str, arguments)],
            env=environment,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )


def script(run: Path, epochs: int, pause_s: float) -> list[object]:
    """The script with its arguments."""
    return [PACED, pause_s, EXAMPLE, run, epochs]


def one_host(
    run: Path, log: Path, *, ranks: int = 4, epochs: int = 3, pause_s: float = 0.1
) -> "subprocess.Popen[str]":
    """An agent that starts all ranks, again after each of up to three losses."""
    settings = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    return agent([*settings, *script(run, epochs, pause_s)], log)


def host(
    run: Path, log: Path, port: int, number: int, *, epochs: int = 10, pause_s: float = 0.5
) -> "subprocess.Popen[str]":
    """An agent with two ranks of one or two hosts. Host 0 has the rendezvous, and rank 0."""
    settings = [
        "--nnodes=1:2",
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=elastic",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf={ELASTIC},is_host={number == 0}",
        f"--local-addr=127.0.0.{number + 1}",
    ]
    return agent([*settings, *script(run, epochs, pause_s)], log, prefix=apart())


def apart() -> list[str]:
    """A command prefix that gives processes their own numbers, as on another host; or nothing."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    allowed = shutil.which("unshare") and not subprocess.run([*prefix, "true"]).returncode
    return prefix if allowed else []


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def descendants(process: int) -> list[int]:
    """The processes that a process has started, with those that they have started."""
    found: list[int] = []
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *descendants(child)]
    return found


def rank_of(process: int) -> int:
    """The rank of a process; -1 if it is none."""
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return -1


def kill_rank(process: "subprocess.Popen[str]", rank: int) -> None:
    """Kill one rank of an agent."""
    (victim,) = (child for child in descendants(process.pid) if rank_of(child) == rank)
    os.kill(victim, signal.SIGKILL)


def kill_host(process: "subprocess.Popen[str]") -> None:
    """Kill an agent and all its processes, as if the host had lost its power."""
    for victim in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    process.wait(LIMIT_S)


def terminate(process: "subprocess.Popen[str]") -> int:
    """Send SIGTERM to an agent, as a scheduler does, and wait for its end."""
    own = next((p for p in descendants(process.pid) if is_agent(p)), process.pid)
    os.kill(own, signal.SIGTERM)
    return process.wait(LIMIT_S)


def is_agent(process: int) -> bool:
    """Return whether a process is torchrun, and no rank of it."""
    return rank_of(process) < 0 and b"torchrun" in Path(f"/proc/{process}/cmdline").read_bytes()


def wait_until(
    condition: Callable[[], bool], process: "subprocess.Popen[str]", limit_s: float = LIMIT_S
) -> float:
    """The time when a condition first holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the agent ended ({process.poll()}), or it took too long")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic()


def steps_to(log: Path, step: int) -> Callable[[], bool]:
    """A test whether the present start has taken this number of steps."""
    return lambda: bool(found := segments([log])) and max(found[-1].losses, default=0) >= step


def first_step(log: Path, start: int) -> Callable[[], bool]:
    """A test whether start number ``start`` has taken a step."""
    return lambda: len(found := segments([log])) > start and bool(found[start].losses)


def measured(run: Path) -> Path:
    """The folder ``run`` with the profile and the cluster of the example."""
    run.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(EXAMPLE), str(run)], env=environment, check=True)
    return run


def same_plans(run: Path, new: Path) -> Path:
    """A folder for another run with the same profile, cluster and plans."""
    new.mkdir()
    for file in run.glob("*.*"):
        shutil.copy(file, new)
    return new


def without_disturbance(run: Path, folder: Path, *, epochs: int = 3) -> dict[int, float]:
    """The losses of a run of four ranks that nothing disturbs."""
    log, new = folder / "whole.log", same_plans(run, folder / "whole")
    if one_host(new, log, epochs=epochs, pause_s=0.0).wait(LIMIT_S):
        raise RuntimeError(log.with_suffix(".err").read_text())
    return losses(segments([log]))


def lose_a_worker(run: Path, log: Path, rank: int) -> dict[str, float]:
    """Kill a rank after step 23; the seconds until the next step."""
    process = one_host(run, log)
    wait_until(steps_to(log, 23), process)
    before = {child for child in descendants(process.pid) if rank_of(child) >= 0}
    kill_rank(process, rank)
    killed = time.monotonic()
    stopped = wait_until(lambda: not before & set(descendants(process.pid)), process)
    started = wait_until(lambda: len(segments([log])) == 2, process)
    stepped = wait_until(first_step(log, 1), process)
    process.wait(LIMIT_S)
    return seconds(killed, stopped=stopped, started=started, stepped=stepped)


def lose_a_host(run: Path, log: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Kill host 1 after step 23, start it again at step 40; seconds until the next steps."""
    port = free_port()
    first = host(run, log, port, 0)
    second = host(run, log.with_name("second.log"), port, 1)
    wait_until(lambda: steps_to(log, 23)() and segments([log])[-1].ranks == 4, first)
    starts = len(segments([log]))
    before = {child for child in descendants(first.pid) if rank_of(child) >= 0}
    kill_host(second)
    killed = time.monotonic()
    stopped = wait_until(lambda: not before & set(descendants(first.pid)), first)
    started = wait_until(lambda: len(segments([log])) == starts + 1, first)
    stepped = wait_until(first_step(log, starts), first)
    lost = seconds(killed, stopped=stopped, started=started, stepped=stepped)
    wait_until(steps_to(log, 40), first)
    before = {child for child in descendants(first.pid) if rank_of(child) >= 0}
    back = time.monotonic()
    second = host(run, log.with_name("second.log"), port, 1)
    stopped = wait_until(lambda: not before & set(descendants(first.pid)), first)
    started = wait_until(lambda: len(segments([log])) == starts + 2, first)
    stepped = wait_until(first_step(log, starts + 1), first)
    wait_until(steps_to(log, max(segments([log])[-1].losses) + 5), first)
    terminate(first)
    kill_host(second)
    return lost, seconds(back, stopped=stopped, started=started, stepped=stepped)


def seconds(since: float, *, stopped: float, started: float, stepped: float) -> dict[str, float]:
    """The parts of the time until the next step."""
    return {
        "stopped_s": round(stopped - since, 2),
        "started_s": round(started - stopped, 2),
        "stepped_s": round(stepped - started, 2),
        "all_s": round(stepped - since, 2),
    }


def apart_from(found: dict[int, float], whole: dict[int, float]) -> float:
    """The largest relative difference of a loss that was found."""
    return max(abs(loss / whole[step] - 1) for step, loss in found.items())


def planned_s(run: Path, ranks: int) -> float:
    """Seconds that a new process takes for a plan of these ranks, as rank 0 does."""
    program = (
        "import sys, time; from penstock import read_profile, read_cluster, plan_pipeline\n"
        "start, (_, run, ranks) = time.perf_counter(), sys.argv\n"
        "profile = read_profile(f'{run}/profile.json')\n"
        "part = read_cluster(f'{run}/cluster.toml').first(int(ranks))\n"
        "plan_pipeline(profile, part, 32, micro_batch_size=8, time_limit_s=2.0)\n"
        "print(time.perf_counter() - start)\n"
    )
    command = [sys.executable, "-c", program, str(run), str(ranks)]
    return round(float(subprocess.run(command, capture_output=True, check=True).stdout), 2)


def main() -> None:
    """Run the benchmark; the file is written again after each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"worker": [], "host": [], "back": []}
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planned = measured(folder / "planned")
        whole = without_disturbance(planned, folder, epochs=10)
        record = {"machine": machine, "planned_s": {n: planned_s(planned, n) for n in (4, 2)}}
        shutil.copy(folder / "whole" / "plan-4.json", planned)
        for kind, number in product(("worker", "host"), range(arguments.runs)):
            run = same_plans(planned, folder / f"{kind}-{number}")
            log, load = folder / f"{kind}-{number}.log", round(os.getloadavg()[0], 1)
            if kind == "worker":
                rows = {"worker": lose_a_worker(run, log, number % 4)}
            else:
                rows = dict(zip(("host", "back"), lose_a_host(run, log), strict=True))
            apart_by = apart_from(losses(segments([log])), whole)
            for key, row in rows.items():
                found[key].append({**row, "largest_difference_of_losses": apart_by, "load": load})
                print(key, found[key][-1], flush=True)
            arguments.out.write_text(json.dumps({**record, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
