"""Feed changed files to every reader; docs/benchmarks/reliability.md has a run.

    python benchmarks/reliability/readers.py --count 100000 --out readers.json

Each input is a good file of `corpus` with a few changes. It must be read, or refused by an error of
Penstock's own of at most `LONGEST_MESSAGE` characters, with `CPU_LIMIT_S` seconds of computing and
`MEMORY_LIMIT` bytes. The number of an input alone decides what it is. A process of its own reads
many of them; where it dies, the next goes on behind the input that killed it. With ``--keep`` the
smallest input of each failure is added to the corpus, which a test replays.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from progress import finished

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
LONGEST_MESSAGE = 600
CPU_LIMIT_S = 2.0
MEMORY_LIMIT = 512 << 20
WAIT_S = 120
"""Seconds without a finished input after which the process is killed."""
COUNTS_EVERY = 500
FOUND = "found-"
"""How the names of inputs begin that a reader once failed on."""
LARGEST_KEPT = 8192
"""Bytes of the largest input that is added to the corpus."""


class TooLongError(BaseException):
    """Reading has taken more than `CPU_LIMIT_S`."""


@dataclass(frozen=True)
class Verdict:
    """How a reader took an input: "read", "refused", or what went wrong, and where."""

    kind: str
    place: str = ""
    message: str = ""
    cpu_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it should have been otherwise."""
        return self.kind not in ("read", "refused")


def judge(reader: Any, path: Path) -> Verdict:
    """Read a file, within the limit of time."""
    from penstock.errors import PenstockError

    signal.signal(signal.SIGPROF, too_long)
    start_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S, 0.1)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            reader.read(path)
    except PenstockError as error:
        kind, failure = "refused", error
    except TooLongError as error:
        kind, failure = "slow", error
    except BaseException as error:
        kind, failure = "memory" if isinstance(error, MemoryError) else "raw", error
    else:
        kind, failure = "read", None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    cpu_s, text = time.process_time() - start_s, str(failure) if failure else ""
    if kind == "refused" and (len(text) > LONGEST_MESSAGE or "\n" in text):
        kind = "message"
    if kind in ("read", "refused"):
        return Verdict(kind, "", text, cpu_s)
    return Verdict(kind, place_of(failure), text[:200], cpu_s)


def too_long(number: int, frame: object) -> None:
    """The handler of the alarm."""
    raise TooLongError


def place_of(failure: BaseException | None) -> str:
    """Type, file and line of an exception, at the last line of Penstock's own."""
    trace, place = failure.__traceback__ if failure else None, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "penstock" in name:
            place = f"{Path(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(failure).__name__} at {place}"


def starts_of(name: str) -> list[bytes]:
    """The good files of a reader, in a fixed order.

    Inputs that it once failed on are left out, so that keeping one does not change what all later
    numbers mean.
    """
    paths = sorted((CORPUS / name).iterdir())
    return [path.read_bytes() for path in paths if not path.name.startswith(FOUND)]


def input_of(name: str, reader: Any, starts: list[bytes], number: int) -> bytes:
    """Input ``number`` of a reader."""
    from mutations import mutated

    data = mutated(starts, number)
    return reader.mend(data) if reader.mend and number % 2 else data


def read_starts(name: str, folder: Path) -> None:
    """Read the undamaged files of a reader, without a limit, so that everything is imported."""
    from formats import READERS

    reader = READERS[name]
    for start in starts_of(name):
        (folder / reader.file).write_bytes(start)
        reader.read(folder / reader.file)


def read_many(name: str, first: int, count: int, folder: Path) -> None:
    """The process that reads; it writes its place, its counts and its failures into ``folder``."""
    from formats import READERS

    reader, starts = READERS[name], starts_of(name)
    path = folder / reader.file
    os.chdir(folder)
    read_starts(name, folder)
    limit_memory()
    counts, longest, slowest_s = Counter[str](), 0, 0.0
    place = os.open(folder / "place", os.O_CREAT | os.O_WRONLY)
    with (folder / "failures").open("a") as failures:
        for number in range(first, first + count):
            os.pwrite(place, b"%12d" % number, 0)
            path.write_bytes(input_of(name, reader, starts, number))
            verdict = judge(reader, path)
            counts[verdict.kind] += 1
            slowest_s = max(slowest_s, verdict.cpu_s)
            if verdict.kind == "refused":
                longest = max(longest, len(verdict.message))
            if verdict.failed:
                print(json.dumps({"number": number, **asdict(verdict)}), file=failures, flush=True)
            if number % COUNTS_EVERY == 0 or number == first + count - 1:
                found = {"counts": counts, "longest": longest, "slowest_s": slowest_s}
                (folder / "counts").write_text(json.dumps(found))


def limit_memory() -> None:
    """From now on, this process may take `MEMORY_LIMIT` bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_reader(name: str, first: int, count: int) -> dict[str, Any]:
    """Feed ``count`` inputs to a reader, in as many processes as it takes."""
    end, at, before_s = first + count, first, children_cpu_s()
    counts, longest, slowest_s = Counter[str](), 0, 0.0
    failures: list[dict[str, Any]] = []
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    while at < end:
        with tempfile.TemporaryDirectory(prefix="penstock-readers-", dir=shared) as made:
            folder = Path(made)
            command = [sys.executable, __file__, "--worker", name, str(at), str(end - at), made]
            process = subprocess.Popen(command)
            whole = finished(process, folder / "place", WAIT_S)
            if (folder / "counts").exists():
                found = json.loads((folder / "counts").read_text())
                counts.update(found["counts"])
                longest = max(longest, found["longest"])
                slowest_s = max(slowest_s, found["slowest_s"])
            lines = (folder / "failures").read_text().splitlines()
            failures += [json.loads(line) for line in lines]
            at = end if whole else int((folder / "place").read_text()) + 1
            if not whole:
                died = Verdict("died", message=f"the process ended with {process.returncode}")
                failures.append({"number": at - 1, **asdict(died)})
    return {
        "reader": name,
        "inputs": count,
        "read": counts["read"],
        "refused": counts["refused"],
        "failed": len(failures),
        "longest_message": longest,
        "slowest_s": round(slowest_s, 3),
        "cpu_s": round(children_cpu_s() - before_s),
        "failures": grouped(failures),
    }


def children_cpu_s() -> float:
    """Seconds of computing of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def grouped(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first failure of each kind and place, with how often it came."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for failure in failures:
        group = groups.setdefault((failure["kind"], failure["place"]), {**failure, "times": 0})
        group["times"] += 1
        group["numbers"] = [*group.get("numbers", []), failure["number"]][:50]
    return sorted(groups.values(), key=lambda group: -group["times"])


def keep(result: dict[str, Any]) -> None:
    """Add the smallest input of each failure to the corpus, and forget the other numbers."""
    from formats import READERS

    name = result["reader"]
    reader, starts = READERS[name], starts_of(name)
    for group in result["failures"]:
        inputs = [input_of(name, reader, starts, number) for number in group["numbers"]]
        smallest = min(inputs, key=len)
        if len(smallest) <= LARGEST_KEPT:
            sign = hashlib.sha256(smallest).hexdigest()[:12]
            (CORPUS / name / f"{FOUND}{sign}{Path(reader.file).suffix}").write_bytes(smallest)


def main() -> None:
    """Read the options, feed the readers, write what came of it."""
    sys.path.insert(0, str(HERE))
    from formats import READERS

    options = argparse.ArgumentParser(description="Feed changed files to every reader.")
    options.add_argument("--count", type=int, default=1000, help="inputs for each reader")
    options.add_argument("--first", type=int, default=0, help="number of the first input")
    options.add_argument("--only", nargs="*", default=list(READERS), choices=list(READERS))
    options.add_argument("--keep", action="store_true", help="add failures to the corpus")
    options.add_argument("--out", type=Path, help="where to write the results as JSON")
    options.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker:
        name, first, count, folder = chosen.worker
        read_many(name, int(first), int(count), Path(folder))
        return
    failed = False
    for name in chosen.only:
        result = run_reader(name, chosen.first, chosen.count)
        if chosen.keep:
            keep(result)
        for group in result["failures"]:
            group.pop("numbers")
        print(json.dumps(result), flush=True)
        failed |= bool(result["failures"])
        if chosen.out:
            add(result, chosen.out)
    sys.exit(failed)


def add(result: dict[str, Any], path: Path) -> None:
    """Put a reader's result into the file of results, with date and machine."""
    known = json.loads(path.read_text())["readers"] if path.exists() else []
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "readers": [*(r for r in known if r["reader"] != result["reader"]), result],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> str:
    """The name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
