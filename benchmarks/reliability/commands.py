"""Run changed command lines of every command; docs/benchmarks/reliability.md has a run.

    python benchmarks/reliability/commands.py --count 5000 --out commands.json

Each line of `command_lines` runs through the entry point of ``penstock``, in a folder of its own
with good and bad files. It must end with exit code 0, or with another one and a single line
``penstock: ...`` of at most `LONGEST_MESSAGE` characters, within `CPU_LIMIT_S` seconds of
computing. It may leave no file but those that it was asked for, and change none. One process runs
many lines; where it dies, the next goes on behind the line that killed it. Every `REAL_EVERY`-th
line runs in a process of its own, as people start it. No worker can start: the temporary directory
has a name that is too long for a socket.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from progress import finished

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
KEPT = HERE / "command_lines.json"
"""Lines of every kind, and all that once failed; a test runs them."""

LONGEST_MESSAGE = 600
CPU_LIMIT_S = 10.0
WAIT_S = 120
"""Seconds after which a line that waits for something is given up."""
FIRST_WAIT_S = 600
"""Seconds that may pass besides until the loops are compiled and the first line runs."""

REAL_EVERY = 50
PREFIX = "penstock: "
LONG_NAME = "temporary-directory-" + "x" * 100
FLAGS = ("--json", "--quiet", "--explain", "--timeline", "--resume", "--no-verify")
CACHE = "torchinductor_"
"""How the name of a cache begins that torch makes in the temporary directory."""

MADE = ("runs", "run/report.html", "run/trace.json")
"""Files that commands write without being asked for a place."""

MODULE = """
import sys
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

def batches(split, seed, start_step, batch_size):
    import torch
    while True:
        yield torch.zeros(batch_size, 8), torch.zeros(batch_size, 8)

def raises():
    raise RuntimeError("a model\\nthat cannot be built " + "x" * 400)

def exits():
    sys.exit(0)
"""


class TooLongError(BaseException):
    """A line has taken more than `CPU_LIMIT_S`."""


@dataclass(frozen=True)
class Ended:
    """How a command line ended; ``code`` is None if it was stopped."""

    code: object
    out: str
    error: str
    cpu_s: float


def make_folder(folder: Path) -> None:
    """The files that command lines name, good and bad ones."""
    goods = {
        "profile.json": "profile/small.json",
        "graph.txt": "pipedream/small.txt",
        "plan.json": "plan/small.json",
        "schedule.txt": "schedule/schedule-0.txt",
        "run/plan.json": "plan/small.json",
        "run/profile.json": "profile/small.json",
        "run/summary.json": "summary/small.json",
        "run/metrics.jsonl": "steps/small.jsonl",
        "broken/plan.json": "plan/small.json",
    }
    for name, source in goods.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(CORPUS / source, folder / name)
    cluster = "[[hosts]]\nname = 'h'\nlink_bandwidth = '1 GB/s'\nlink_latency = '5 us'\n"
    cluster = (
        f"name = 'three'\n{cluster}[[hosts.devices]]\nkind = 'c'\nmemory = '1 GB'\ncount = 3\n"
    )
    plan = json.loads((CORPUS / "plan" / "small.json").read_text())
    wide = {**plan, "stages": [{**plan["stages"][0], "layers": [0, 1]}, plan["stages"][1]]}
    wide["stages"][1] = {**wide["stages"][1], "layers": [1, 2], "recompute": False}
    job = "model = 'job_module:{}'\ndata = 'job_module:batches'\nbatch_size = 16\nsteps = 2\n"
    job += "loss = 'torch.nn.functional:mse_loss'\nmicro_batch_sizes = [4]\n"
    texts = {
        "cluster.toml": cluster,
        "run/cluster.toml": cluster,
        "misfit.json": json.dumps({**plan, "micro_batch_size": 8}),
        "job_module.py": MODULE,
        "empty": "",
        "unreadable.json": "{}",
        **{"job.toml": job.format("build"), "job.TOML": job.format("build")},
        **{f"{name}.toml": job.format(name) for name in ("raises", "exits")},
        **{name: json.dumps(wide) for name in ("plan.json", "run/plan.json")},
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "unreadable.json").chmod(0)
    (folder / "binary").write_bytes(bytes(range(256)) * 16)
    for name in ("folder", "locked"):
        (folder / name).mkdir()
    (folder / "locked").chmod(0o555)
    (folder / "link.json").symlink_to("folder/behind.json")
    (folder / "dangling").symlink_to("absent/x.json")
    (folder / "loop").symlink_to("loop")
    add_timelines(folder)


def add_timelines(folder: Path) -> None:
    """Complete the run with two timelines, and the plan with what it was made for."""
    run = folder / "run"
    os.chdir(folder)
    timeline = ("--profile=profile.json", "--cluster=cluster.toml", "--quiet", "--json")
    for name in ("predicted.json", "measured.json"):
        ended = run_here(("simulate", "plan.json", *timeline, f"--out={run / name}"))
        if ended.code != 0:
            raise SystemExit(f"a good line fails: {ended}")
    origin = {"format": "penstock-prediction", "profile": "profile.json", "cluster": "cluster.toml"}
    (folder / "plan.predicted.json").write_text(json.dumps(origin))


def run_here(words: Sequence[str]) -> Ended:
    """Run a command line in this process, through the entry point of ``penstock``."""
    from penstock import cli

    buffers = BytesIO(), BytesIO()
    out = TextIOWrapper(buffers[0], "utf-8", write_through=True)
    error = TextIOWrapper(buffers[1], "utf-8", "backslashreplace", write_through=True)
    before, sys.argv = sys.argv, ["penstock", *words]
    signal.signal(signal.SIGPROF, too_long)
    start_s, code = time.process_time(), None
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S, 0.1)
    try:
        with redirect_stdout(out), redirect_stderr(error):
            cli.main()
    except SystemExit as ended:
        code = ended.code
    except TooLongError:
        code = None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.argv = before
    texts = [stream.getvalue().decode() for stream in buffers]
    return Ended(code, texts[0], texts[1], time.process_time() - start_s)


def run_apart(words: Sequence[str]) -> Ended:
    """Run a command line in a process of its own."""
    command = [sys.executable, "-c", "from penstock.cli import main; main()", *words]
    before_s = children_cpu_s()
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
    out, error = (text.decode(errors="backslashreplace") for text in (done.stdout, done.stderr))
    return Ended(done.returncode, out, error, children_cpu_s() - before_s)


def children_cpu_s() -> float:
    """Seconds of computing of all processes that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def too_long(number: int, frame: object) -> None:
    """The handler of the alarm, which comes once: this process may work on while it ends."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    raise TooLongError


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of all files in a folder; zeros for folders."""
    found: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*"):
        if "__pycache__" not in path.parts:
            status, is_folder = path.lstat(), path.is_dir()
            state = (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
            found[str(path.relative_to(folder))] = state
    return found


def flaw_of(words: Sequence[str], ended: Ended, changed: Sequence[str], left: Sequence[str]) -> str:
    """What a line did that it may not; empty if it did nothing wrong."""
    lines = [line for line in ended.error.splitlines() if line.startswith(PREFIX)]
    if ended.code is None:
        return f"more than {CPU_LIMIT_S:g} s"
    if "Traceback" in ended.error or "the traceback is in" in ended.error:
        return f"an error of Python's: {ended.error.strip()[-200:]}"
    if len(lines) != (ended.code != 0):
        return f"exit code {ended.code} with {len(lines)} lines of error: {ended.error[-200:]}"
    if lines and (len(lines[0]) > LONGEST_MESSAGE or not lines[0].isprintable()):
        return f"a line of {len(lines[0])} characters: {lines[0][:100]!r}"
    if ended.code not in (0, 2, 3, 4):
        return f"exit code {ended.code}"
    if ended.code == 0 and is_json_asked(words) and not is_object(ended.out):
        return f"no JSON object: {ended.out[:100]!r}"
    allowed = may_write(words, ended.code == 0)
    other = [name for name in changed if not any(name.startswith(place) for place in allowed)]
    return f"left or changed {[*other, *left]}" if other or left else ""


def is_json_asked(words: Sequence[str]) -> bool:
    """Whether ``--json`` is among the words, and is not the value of an option before it."""
    pairs = zip(("", *words), words, strict=False)
    return any(
        word == "--json" and (before in FLAGS or not before.startswith("-"))
        for before, word in pairs
    )


def is_object(text: str) -> bool:
    """Whether a text is one JSON object, or the help that was asked for."""
    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return text.lstrip().startswith("Usage")


def refuse(constant: str) -> None:
    """Raise for NaN and infinity, which JSON does not have."""
    raise ValueError(constant)


def may_write(words: Sequence[str], done: bool) -> list[str]:
    """How the names of files begin that a line may write."""
    if not done and "train" not in words:
        return []
    # A run that could not start keeps its directory.
    places = [*words] + [word.partition("=")[2] for word in words if "=" in word]
    places += [word.removeprefix("-o") for word in words if word.startswith("-o")]
    names = [os.path.normpath(place) for place in places if place]
    beside = [
        str(Path(name).with_suffix(".predicted.json"))
        for name in names
        if "\0" not in name and Path(name).name
    ]
    return [*names, *beside, "folder/behind.json", *MADE]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder to run in, and a temporary directory in which no socket has room."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    before, directory, old = os.environ.get("TMPDIR"), tempfile.tempdir, Path.cwd()
    with tempfile.TemporaryDirectory(prefix="penstock-commands-", dir=shared) as made:
        for name in ("kept", "work", LONG_NAME):
            (Path(made) / name).mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(made) / LONG_NAME)
        try:
            make_folder(Path(made) / "kept")
            restore(Path(made))
            yield Path(made)
        finally:
            os.chdir(old)
            tempfile.tempdir = directory
            os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)


def restore(place: Path) -> None:
    """The folder in which lines run as it was, and nothing in the temporary directory."""
    os.chdir(place)
    shutil.rmtree(place / "work")
    shutil.copytree(place / "kept", place / "work", symlinks=True)
    for path in (place / LONG_NAME).iterdir():
        if not path.name.startswith("pymp-"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.chdir(place / "work")


def judge(words: Sequence[str], place: Path, apart: bool = False) -> tuple[Ended, str]:
    """Run a line in its folder; its end, and what was wrong with it."""
    work, temporary = place / "work", place / LONG_NAME
    before, there = state_of(work), [path.name for path in temporary.iterdir()]
    ended = run_apart(words) if apart else run_here(words)
    after = state_of(work)
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    # Python keeps this process's own temporary directory until the end.
    own = [] if apart else [path.name for path in temporary.glob("pymp-*")]
    new = {path.name for path in temporary.iterdir()} - {*there, *own}
    left = sorted(name for name in new if not name.startswith(CACHE))
    left += [path.name for path in Path("/dev/shm").glob(f"*_{os.getpid()}_*")]
    flaw = flaw_of(words, ended, changed, left)
    if changed or left:
        restore(place)
    return ended, flaw


def run_many(first: int, count: int, folder: Path) -> None:
    """The process that runs lines; it writes its place, counts and failures into ``folder``."""
    from command_lines import GOOD, line_of

    commands = tree()
    at = os.open(folder / "place", os.O_CREAT | os.O_WRONLY)
    with scratch() as place, (folder / "failures").open("a") as failures:
        for words in (words for some in GOOD.values() for words in some):
            judge(words, place)
        results: dict[str, dict[str, Any]] = {}
        for number in range(first, first + count):
            os.pwrite(at, b"%12d" % number, 0)
            line = line_of(number, commands)
            apart = number % REAL_EVERY == 0 and not any("\0" in word for word in line.words)
            ended, flaw = judge(line.words, place, apart)
            add(results, line.command, ended, apart)
            if flaw:
                found = {"number": number, "words": line.words, "flaw": flaw}
                print(json.dumps(found), file=failures, flush=True)
            (folder / "counts").write_text(json.dumps(results))


def add(results: dict[str, dict[str, Any]], command: str, ended: Ended, apart: bool) -> None:
    """Count a line."""
    lines = [line for line in ended.error.splitlines() if line.startswith(PREFIX)]
    mine = results.setdefault(command, {"codes": {}, "longest": 0, "slowest_s": 0.0, "apart": 0})
    code = str(ended.code)
    mine["codes"][code] = mine["codes"].get(code, 0) + 1
    mine["longest"] = max(mine["longest"], *map(len, lines), 0)
    mine["slowest_s"] = max(mine["slowest_s"], round(ended.cpu_s, 3))
    mine["apart"] += apart


def tree() -> dict[str, Any]:
    """The commands of the command line, by name, with their options."""
    import typer

    from penstock.cli import app_of

    return dict(getattr(typer.main.get_command(app_of()), "commands"))  # noqa: B009


def run_all(first: int, count: int) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Run lines, in as many processes as it takes; the counts of each command, and failures."""
    at, end = first, first + count
    total: dict[str, dict[str, Any]] = {}
    failures: list[dict[str, Any]] = []
    while at < end:
        with tempfile.TemporaryDirectory(prefix="penstock-commands-") as made:
            folder = Path(made)
            command = [sys.executable, __file__, "--worker", str(at), str(end - at), made]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            whole = finished(process, folder / "place", WAIT_S, FIRST_WAIT_S)
            if (folder / "counts").exists():
                join(total, json.loads((folder / "counts").read_text()))
            if (folder / "failures").exists():
                texts = (folder / "failures").read_text().splitlines()
                failures += [json.loads(text) for text in texts]
            if not whole and not (folder / "place").exists():
                raise SystemExit("the process that runs the lines could not start")
            at = end if whole else int((folder / "place").read_text()) + 1
            if not whole:
                flaw = f"the process ended with {process.returncode}"
                failures.append({"number": at - 1, "flaw": flaw})
    return total, failures


def join(total: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the counts of a process."""
    for command, found in more.items():
        mine = total.setdefault(command, {"codes": {}, "longest": 0, "slowest_s": 0.0, "apart": 0})
        mine["codes"] = dict(Counter(mine["codes"]) + Counter(found["codes"]))
        mine["apart"] += found["apart"]
        for key in ("longest", "slowest_s"):
            mine[key] = max(mine[key], found[key])


def replay() -> int:
    """Run the fixed list of lines; prints failures, and returns how many there are."""
    failures = 0
    with scratch() as place:
        for words in json.loads(KEPT.read_text()):
            _, flaw = judge(words, place)
            failures += bool(flaw)
            if flaw:
                print(json.dumps({"words": words, "flaw": flaw}))
    return failures


def main() -> None:
    """Read the options, run the lines, write what came of it."""
    sys.path.insert(0, str(HERE))
    options = argparse.ArgumentParser(description="Run changed command lines.")
    options.add_argument("--count", type=int, default=500, help="number of lines")
    options.add_argument("--first", type=int, default=0, help="number of the first line")
    options.add_argument("--out", type=Path, help="where to write the results as JSON")
    options.add_argument("--replay", action="store_true", help="run the fixed list of lines")
    options.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.replay:
        sys.exit(replay())
    if chosen.worker:
        first, count, folder = chosen.worker
        run_many(int(first), int(count), Path(folder))
        return
    from readers import machine

    commands, failures = run_all(chosen.first, chosen.count)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "lines": chosen.count,
        "commands": commands,
        "failures": failures,
    }
    for failure in failures:
        print(json.dumps(failure))
    print(json.dumps(commands))
    if chosen.out:
        chosen.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
