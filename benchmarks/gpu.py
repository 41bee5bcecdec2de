"""The proof of a GPU day: does what is shown without a GPU hold on one?

    python benchmarks/gpu.py --part 1 [--out DIR]    # facts, models, no waits, ranks, the hazard
    python benchmarks/gpu.py --part 2 [--out DIR]    # each rank alone, estimates, overhead, copies
    python benchmarks/gpu.py --only 1.2 2.3          # some of it
    python benchmarks/gpu.py --ranks                 # on a host with several GPUs: NCCL itself
    python benchmarks/gpu.py --stand-in --small      # a little of all, without a GPU

Either part takes at most nine minutes on one H100. Each of its parts runs in a process of its own
and may fail or run out of time without ending the others. At the end there are one table and one
JSON; the exit code is the number of rows that fail. On the stand-in what only a device can judge
runs, and its rows are not judged.

It downloads nothing.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from json import dumps
from pathlib import Path
from time import perf_counter, strftime
from traceback import extract_tb

HERE = Path(__file__).parent / "gpu"
ROOT = HERE.parent.parent
# Without this folder, which has a module of the name of a package of the tests.
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE.parent]
for place in (HERE, HERE.parent / "models", ROOT / "tests", ROOT / "src"):
    if str(place) not in sys.path:
        sys.path.append(str(place))

import torch  # noqa: E402
from rows import Row, Setting, failing, read_rows, table, write_rows  # noqa: E402


@dataclass(frozen=True)
class Part:
    """A part by its module's function, which yields rows; ``limit_s`` is all it may take."""

    name: str
    module: str
    function: str
    limit_s: float

    def rows(self, setting: Setting) -> Iterator[Row]:
        """Its rows; an error is the last of them."""
        setting = replace(setting, ends_s=perf_counter() + 0.9 * self.limit_s)
        try:
            yield from vars(import_module(self.module))[self.function](setting)
        except Exception as error:
            frame = extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            text = f"{type(error).__name__}: {error} ({where})"
            yield Row(self.name, self.function.replace("_", " "), text[:500], "failed")


PARTS = (
    Part("1.1", "facts", "facts", 100),
    Part("1.2", "judged_stages", "models_in_stages", 160),
    Part("1.3", "judged_stages", "no_host_waits", 40),
    Part("1.4", "judged_ranks", "ranks_of_one_gpu", 180),
    Part("1.5", "hazard", "receives_before_first_launches", 60),
    Part("2.1", "lonely_rank", "each_rank_alone", 180),
    Part("2.2", "judged_estimates", "estimates_and_predictions", 260),
    Part("2.4", "overhead", "overhead_and_copies", 60),
    Part("2.5", "small_memory", "state_in_host_memory", 60),
    Part("2.6", "small_memory", "quantised_bases", 90),
)
SEVERAL = Part("3", "several_gpus", "several_gpus", 600)


def in_own_process(part: Part, setting: Setting) -> list[Row]:
    """The rows of a part that another process runs: it may hang or be killed."""
    path = setting.out / f"rows-{part.name}.jsonl"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--only", part.name, "--out", str(setting.out), "--child"]
    command += ["--small"] * setting.small + ["--stand-in"] * setting.stand_in
    try:
        code = subprocess.run(command, timeout=part.limit_s).returncode
        ending = "" if code == 0 else f"its process ended with code {code}"
    except subprocess.TimeoutExpired:
        ending = f"not done after {part.limit_s:g} s"
    rows = read_rows(path)
    if ending or not rows:
        rows.append(Row(part.name, part.function.replace("_", " "), ending or "no row", "failed"))
    return rows


def told_as_they_come(part: Part, setting: Setting) -> list[Row]:
    """The rows of a part that runs here, printed and written one by one."""
    rows: list[Row] = []
    for row in part.rows(setting):
        rows.append(row)
        print(table([row]).splitlines()[0], flush=True)
        write_rows(rows, setting.out / f"rows-{part.name}.jsonl")
    return rows


def run_parts(parts: Sequence[Part], setting: Setting, run: Callable[..., list[Row]]) -> int:
    """Run parts one after another; print and write what they found; how many rows fail."""
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for part in parts:
        start_s = perf_counter()
        rows += run(part, setting)
        seconds[part.name] = round(perf_counter() - start_s, 1)
    where = "stand-in" if setting.stand_in else torch.cuda.get_device_name()
    found = {
        "device": where,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "seconds": seconds,
        "rows": [vars(row) for row in rows],
    }
    (setting.out / "results.json").write_text(dumps(found, indent=1) + "\n")
    print(f"\n{where}, torch {torch.__version__}\n{table(rows)}")
    return len(failing(rows))


def main() -> int:
    """Run the chosen parts; the number of rows that fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["1", "2"], help="one half (default: both)")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART")
    parser.add_argument("--ranks", action="store_true", help="NCCL, on all GPUs of this host")
    parser.add_argument("--out", type=Path, default=Path("gpu-day"))
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setting = Setting(arguments.stand_in, arguments.small, arguments.out)
    if setting.stand_in:
        import_module("stand_in_gpu").install(devices=4)
    elif not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device; try --stand-in --small")
    setting.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if part.name.startswith(arguments.part or "")]
    if arguments.only:
        parts = [part for part in PARTS if part.name in arguments.only]
    if arguments.ranks:
        parts = [SEVERAL]
    if arguments.child:
        told_as_they_come(parts[0], setting)
        return 0
    together = setting.small or arguments.ranks
    return min(run_parts(parts, setting, told_as_they_come if together else in_own_process), 100)


if __name__ == "__main__":
    sys.exit(main())
