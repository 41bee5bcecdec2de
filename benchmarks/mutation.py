"""Break one line after another, and see whether a test fails; docs/benchmarks/tests.md has a run.

    nice python benchmarks/mutation.py --count 120 --seed 1 --processes 2
    nice python benchmarks/mutation.py --resume      # go on with a run that was stopped
    nice python benchmarks/mutation.py --again       # what was not caught, with the tests of today
    nice python benchmarks/mutation.py --again --only rings.py --first tests/runtime/test_x.py
    nice python benchmarks/mutation.py --confirm     # after a run that was stopped for good
    python benchmarks/mutation.py --tables           # the tables of the page

Each mutant is a copy of the sources with one small mistake in one file: another comparison, sign,
constant or truth value, `min` for `max`, a statement left out. In the C++ core the same is done to
its tokens, and the copy's core is built again. The tests run until the first fails: the examples
in the file's docstrings, those of its package, then others that import its module. A mutant that
no test fails on has survived; one on which none has failed within the limit of computing is alive.
Both want looking at. When all are judged, the tests that failed run once without any mistake: one
that fails then as well has caught nothing.

Each package has its share of mistakes by its lines of code, and at least `FEWEST`; the core has
`CORE_SHARE` of all. Within a package the seed alone draws. `benchmarks/mutation/judged.json` holds
what was judged by hand: mistakes that change nothing anybody could see (others are drawn in their
place), and why one was left that no test catches. Linux only.
"""

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[1]
SOURCE = "src/penstock"
RESULTS = ROOT / "benchmarks" / "mutation" / "results.json"
JUDGED = ROOT / "benchmarks" / "mutation" / "judged.json"

FEWEST = 3
CORE_SHARE = 1 / 6

WALL_PER_CPU = 8
"""The limit in seconds of the clock: a test that waits for ever computes nothing."""

FIRST_FILES = (3, 8)
"""So many files of tests are read at first, as reading them all takes longer than most need."""

TEST_LIMIT_S = 120
MOST_BYTES = 8 << 30

ALSO = {
    "jobs": ("system",),
    "examples": ("jobs", "system"),
    "command_line": ("system",),
    "rehearse": ("system",),
    "core": ("simulate", "schedule", "planners", "search", "bounds", "plan", "planning"),
}
"""Folders with further tests of a package."""

CORE_TESTS = {
    "schedule": ("ideal_play", "list_orders", "bind_orders"),
    "planners": ("dapple", "spp", "levels", "slowest_stage", "costs", "transfers", "bind_planners"),
    "search": ("walk", "plan_load", "stage_costs", "bind_walk"),
}
"""Where the tests of a file of the core lie; those of the others are in `simulate`."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A mistake: ``after`` in the place of ``before``, which starts at a line and a column.

    ``text`` is the line, by which the place is found again when lines were added above it.
    """

    file: str
    line: int
    column: int
    before: str
    after: str
    text: str

    @property
    def package(self) -> str:
        """The package it is in; of the modules that are in none, `penstock`."""
        below = Path(self.file).relative_to(SOURCE).parts
        return below[0] if len(below) > 1 else "penstock"


Slot = tuple[str, Iterator[Mutant]]
"""One mistake of the sample: a package, and its mistakes of which the next is taken."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `killed`, `survived`, `alive`, `invalid` or `doubtful`.

    ``test`` is the first test that failed on it, ``commit`` the sources' and tests', ``cpu_s`` the
    computing of all processes.
    """

    mutant: Mutant
    outcome: str
    test: str
    cpu_s: float
    commit: str


def other(value: float) -> float:
    """Another constant, which is felt where a large one stands, too."""
    return value + 1 if value < 100 else 2 * value


def mistakes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare(left, [only], right) if type(only) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(only)]()], right)
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            yield ast.BinOp(left, SIGNS[type(sign)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(other(value))
        case ast.Call(ast.Name(id=name), arguments, keywords) if name in OTHERS:
            yield ast.Call(ast.Name(OTHERS[name]), arguments, keywords)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()


def places(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes of code that runs: no annotations, messages, decorators or lists of exports."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            parts = value if isinstance(value, list) else [value]
            unread = (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)
            waiting += [p for p in parts if isinstance(p, ast.AST) and not isinstance(p, unread)]


def mutants_of(path: Path) -> list[Mutant]:
    """Every mistake that can be made in a file."""
    text = path.read_text(encoding="utf-8")
    file = str(path.relative_to(ROOT))
    lines = text.splitlines()
    if path.suffix != ".py":
        found = [
            Mutant(file, number, column, before, after, lines[number - 1].strip())
            for number, column, before, after in mistakes_in_cpp(text)
        ]
        return found
    return [
        replace(each, text=lines[each.line - 1].strip()) for each in mistakes_in_python(file, text)
    ]


def mistakes_in_python(file: str, text: str) -> Iterator[Mutant]:
    """Every mistake in a module of Python, without its line's text."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for node in places(ast.parse(text)):
        for mistake in mistakes(node):
            line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
            last, end = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
            # `ast.get_source_segment` takes the whole file apart each time.
            segment = [*lines[line - 1 : last - 1], lines[last - 1][:end]]
            segment[0] = segment[0][column:]
            after = ast.unparse(ast.fix_missing_locations(mistake))
            if not isinstance(node, ast.Constant | ast.stmt):
                after = f"({after})"
            yield Mutant(file, line, column, b"".join(segment).decode(), after, "")


CPP_TOKENS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " + ": " - ",
    " - ": " + ",
    " * ": " / ",
    " / ": " * ",
    " % ": " / ",
    " += ": " -= ",
    " -= ": " += ",
    " && ": " || ",
    " || ": " && ",
    "std::min": "std::max",
    "std::max": "std::min",
    "true": "false",
    "false": "true",
}
"""The core is formatted: an operator has spaces around it, the bracket of a template has none."""

CPP_PLACES = re.compile(
    r"(?P<token>"
    + "|".join(sorted(map(re.escape, CPP_TOKENS), key=len, reverse=True))
    + r")|(?<![\w.<])(?P<number>\d+(?:\.\d+)?)(?![\w.>])"
)
CPP_STATEMENT = re.compile(
    r"^ +(?!(?:if|for|else|return|const|auto|double|int|bool|using|break|continue|case|default)\b)"
    r"(?!std::\w+<)"
    r"(?P<statement>(?:\+\+|--)?[a-z]\w*(?:_|\b)[^;{}=]*(?:[-+*/]?= [^;{}]*)?;)$"
)
CPP_UNREAD = re.compile(r"^\s*(#|template|using|static_assert|throw)|\.reserve\(|\.shrink_to_fit\(")
CPP_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'", re.DOTALL)


def mistakes_in_cpp(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Line, column, what is there and what may stand in its place, in a file of the core.

    Not all of them compile: `invalid` is what becomes of those.

    >>> list(mistakes_in_cpp("  if (a <= 2) b = std::min(a, b);  // or 3"))
    [(1, 7, ' <= ', ' < '), (1, 11, '2', '3'), (1, 18, 'std::min', 'std::max')]
    >>> list(mistakes_in_cpp("  seconds += 1;"))[0]
    (1, 2, 'seconds += 1;', ';')
    """
    code = CPP_NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    ended = True
    for number, (line, read) in enumerate(
        zip(code.splitlines(), text.splitlines(), strict=True), 1
    ):
        bare = line.rstrip()
        if CPP_UNREAD.search(bare) or not bare:
            continue
        if ended and (whole := CPP_STATEMENT.match(bare)):
            yield number, whole.start("statement"), read[whole.start("statement") : len(bare)], ";"
        ended = bare.endswith((";", "{", "}", ":")) or (bare.endswith(")") and "if (" in bare)
        for place in CPP_PLACES.finditer(line):
            if before := place["token"]:
                yield number, place.start(), before, CPP_TOKENS[before]
            else:
                value = place["number"]
                after = str(other(float(value) if "." in value else int(value)))
                yield number, place.start(), value, after


def packages() -> dict[str, list[Path]]:
    """The files of each package; `penstock` are the modules that are in none."""
    found: dict[str, list[Path]] = {"penstock": sorted((ROOT / SOURCE).glob("*.py"))}
    for folder in sorted((ROOT / SOURCE).iterdir()):
        if folder.name == "core":
            found["core"] = sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")])
        elif files := sorted(folder.rglob("*.py")):
            found[folder.name] = files
    return found


def shares(count: int, lines: dict[str, int]) -> dict[str, int]:
    """How many mistakes each package has, by its lines: at least `FEWEST`, `CORE_SHARE` the core.

    >>> shares(60, {"core": 10, "runtime": 900, "report": 90, "bounds": 10})
    {'core': 10, 'runtime': 44, 'report': 3, 'bounds': 3}
    """
    rest = round(count * (1 - CORE_SHARE))
    others = {name: number for name, number in lines.items() if name != "core"}
    due = {name: rest * number / sum(others.values()) for name, number in others.items()}
    given = dict.fromkeys(others, FEWEST)
    while sum(given.values()) < rest:
        given[max(due, key=lambda name: due[name] - given[name])] += 1
    return {"core": count - rest, **given}


def drawn_from(files: Iterable[Path], seed: str) -> list[Mutant]:
    """Every mistake of a package that can be seen, in the order in which they are taken."""
    every = [mutant for path in files for mutant in mutants_of(path)]
    random.Random(seed).shuffle(every)
    unseen = {key(one) for one in judged("equal")}
    return [each for each in every if key(asdict(each)) not in unseen]


def judged(verdict: str) -> list[dict[str, str]]:
    """What was judged by hand in one way: `equal`, or `left` of those no test catches."""
    every = json.loads(JUDGED.read_text(encoding="utf-8")) if JUDGED.exists() else []
    return [one for one in every if one["verdict"] == verdict]


def key(mutant: dict[str, str]) -> tuple[str, ...]:
    """By what a mistake is known again in a later state of the sources."""
    return tuple(mutant[name] for name in ("file", "text", "before", "after"))


def with_mistake(text: str, mutant: Mutant) -> str:
    """A file's text with the mistake, at the line that reads as it did and is nearest."""
    lines = text.splitlines(keepends=True)
    alike = [at for at, line in enumerate(lines) if line.strip() == mutant.text]
    if not alike:
        raise ValueError(f"{mutant.file} no longer has the line {mutant.text!r}; draw anew")
    number = min(alike, key=lambda at: abs(at + 1 - mutant.line))
    # Columns of syntax trees count bytes.
    at = sum(map(len, lines[:number])) + len(lines[number].encode()[: mutant.column].decode())
    assert text[at:].startswith(mutant.before), mutant
    return text[:at] + mutant.after + text[at + len(mutant.before) :]


@cache
def test_texts() -> dict[Path, str]:
    """Every file of tests that needs no GPU, with what it says."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {path: path.read_text(encoding="utf-8") for path in files if "cuda" not in path.parts}


def names_around(mutant: Mutant) -> set[str]:
    """Functions and classes that a mistake is in: tests that name them come first."""
    path = ROOT / mutant.file
    if path.suffix != ".py":
        return set()
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, definitions)
        if node.lineno <= mutant.line <= (node.end_lineno or 0) and not node.name.startswith("__")
    }


def tests_for(mutant: Mutant) -> list[str]:
    """The module itself, for its examples, then tests: of its package, of its users, those that
    import it."""
    path = Path(mutant.file).with_suffix("")
    module = ".".join(path.parts[1:])
    names = path.parts[3:] or path.parts[-1:]
    words = {stem(word) for name in names for word in name.split("_")}
    around, users = names_around(mutant), users_of(module)
    first = next((room for room, names in CORE_TESTS.items() if path.name in names), "simulate")

    def order(file: Path) -> tuple[int, int, str]:
        text, folder = test_texts()[file], file.relative_to(ROOT / "tests").parts[0]
        likeness = len(words & {stem(word) for word in file.stem.split("_")[1:]})
        likeness += 4 * bool(re.search(rf"\b{re.escape(module)}\b", text))
        likeness += 3 * sum(bool(re.search(rf"\b{name}\b", text)) for name in around)
        if mutant.package == "core":
            rank = 0 if folder in ("core", first) or likeness else 1
        else:
            rank = 0 if folder in (mutant.package, "system") else 1
        if folder in users and not likeness:
            rank = 2
        return rank, -likeness, str(file)

    rooms = (mutant.package, *ALSO.get(mutant.package, ()), *users)
    files = [
        file
        for file, text in test_texts().items()
        if file.relative_to(ROOT / "tests").parts[0] in rooms
        or re.search(rf"\b{re.escape(module)}\b", text)
    ]
    itself = [mutant.file] if mutant.file.endswith(".py") else []
    return [*itself, *(str(file.relative_to(ROOT)) for file in sorted(files, key=order))]


@cache
def users_of(module: str) -> frozenset[str]:
    """The packages whose sources import a module."""
    named = re.compile(rf"\b{re.escape(module)}\b")
    return frozenset(
        package
        for package, paths in packages().items()
        if any(named.search(path.read_text(encoding="utf-8")) for path in paths)
    )


def stem(word: str) -> str:
    """A word as others of its kind are spelled, too."""
    return word.rstrip("s").removesuffix("ing")


class Workplace:
    """A copy of the repository, in which one mistake at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changes = 0
        self.core_built = False
        for name in ("src", "tests", "docs", "benchmarks", "examples", "build_backend", ".ci"):
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=leave)
        for path in ROOT.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy(path, folder)

    def write(self, path: Path, text: str) -> None:
        """Change a file; one of Python at a time of its own: compiled modules are known by it."""
        path.write_text(text, encoding="utf-8")
        if path.suffix != ".py":  # CMake never has done with a file of the future
            return
        self.changes += 1
        moment = time.time() + 2 * self.changes
        os.utime(path, (moment, moment))

    def build_core(self) -> bool:
        """Build the copy's core, of it what changed; False if that is not C++."""
        core, tools, build = self.folder / SOURCE / "core", self.folder / "tools", self.folder / "b"
        if not tools.exists():
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
            subprocess.run([*pip, str(tools), "nanobind>=3.1"], check=True)
        environment = os.environ | {"PYTHONPATH": str(tools)}
        options = (f"-DPython_EXECUTABLE={sys.executable}", "-GNinja")
        for command in (
            ("cmake", "-S", str(core), "-B", str(build), *options),
            ("cmake", "--build", str(build), "--parallel", "1"),
        ):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode and not self.core_built:
                raise RuntimeError(done.stdout + done.stderr)
            if done.returncode:
                return False
        if not self.core_built:
            (self.folder / "whole").mkdir()
            for built in build.glob("native*.so"):
                shutil.copy(built, self.folder / "whole")
        self.take_core(build)
        self.core_built = True
        return True

    def take_core(self, folder: Path) -> None:
        """Use the core that lies in a folder; not over the old file, which may be mapped."""
        core = self.folder / SOURCE / "core"
        for built in folder.glob("native*.so"):
            shutil.copy(built, core / f"{built.name}.new")
            (core / f"{built.name}.new").rename(core / built.name)

    def judge(self, mutant: Mutant, commit: str, limit_s: float, first: list[str]) -> Verdict:
        """Make the mistake, run the tests, and undo it."""
        path = self.folder / mutant.file
        in_core = mutant.package == "core"
        if in_core and not self.core_built:
            self.build_core()
        text = path.read_text(encoding="utf-8")
        self.write(path, with_mistake(text, mutant))
        try:
            if in_core and not self.build_core():
                return Verdict(mutant, "invalid", "", 0.0, commit)
            outcome, failed, used_s = "survived", [], 0.0
            waiting = [*first, *tests_for(mutant)]
            for size in (len(first), *FIRST_FILES, len(waiting)):
                chosen, waiting = waiting[:size], waiting[size:]
                if chosen and outcome == "survived":
                    outcome, failed, cpu_s = self.tests(["-x", *chosen], limit_s - used_s)
                    used_s += cpu_s
            return Verdict(mutant, outcome, next(iter(failed), ""), round(used_s, 1), commit)
        finally:
            self.write(path, text)
            if in_core:
                self.take_core(self.folder / "whole")

    def tests(self, tests: list[str], limit_s: float) -> tuple[str, list[str], float]:
        """How the tests end, those that fail, and the computing of all their processes."""
        options = ("-n", "0", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_LIMIT_S))
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as output:
            running = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES,) * 2),
            )
            started, cpu_s = time.monotonic(), 0.0
            while running.poll() is None:
                time.sleep(0.2)
                cpu_s = max(cpu_s, sum(members(running.pid).values()))
                if cpu_s > limit_s or time.monotonic() - started > WALL_PER_CPU * limit_s:
                    break
            for process in (running.pid, *members(running.pid)):
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            over = running.returncode is None
            running.wait()
            output.seek(0)
            said = output.read().splitlines()
        failed = [
            line.split(" - ")[0].partition(" ")[2]
            for line in said
            if line.startswith(("FAILED ", "ERROR "))
        ]
        if over:
            return "alive", [], cpu_s
        # Nothing to run is no failure. A core that crashes ends pytest itself.
        outcome = "survived" if running.returncode in (0, 5) else "killed"
        if outcome == "killed" and not failed:
            failed = [f"ended with {running.returncode}"]
        return outcome, failed, cpu_s


def members(session: int) -> dict[int, float]:
    """The processes of a session, each with what it and those it waited for computed."""
    found: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            found[int(path.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


class Run:
    """A sample that several workplaces judge; each verdict is saved at once."""

    def __init__(self, out: Path, known: list[Verdict], limit_s: float, first: list[str]) -> None:
        self.out = out
        self.first = first
        self.limit_s = limit_s
        self.known = {key(asdict(each.mutant)): each for each in known}
        self.lock = Lock()
        command = ("git", "rev-parse", "--short=10", "HEAD")
        self.commit = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    def judge(self, slots: list[Slot], place: Workplace, *, builds: bool) -> None:
        """Judge what is left of the slots; of the core only in the one place that ``builds``."""
        while True:
            with self.lock:
                found = next((each for each in slots if builds or each[0] != "core"), None)
                if found is None:
                    return
                slots.remove(found)
            for mutant in found[1]:
                verdict = self.known.get(key(asdict(mutant)))
                if verdict is None:
                    verdict = place.judge(mutant, self.commit, self.limit_s, self.first)
                    self.add(verdict)
                if verdict.outcome != "invalid":
                    break

    def add(self, verdict: Verdict) -> None:
        """Save a verdict, and print it."""
        mutant = verdict.mutant
        with self.lock:
            self.known[key(asdict(mutant))] = verdict
            self.save()
        where = f"{mutant.file.removeprefix(SOURCE + '/')}:{mutant.line}"
        change = f"{mutant.before!r} -> {mutant.after!r}"
        print(verdict.outcome, f"{verdict.cpu_s} s", where, change, verdict.test, flush=True)

    def confirm(self, place: Workplace) -> None:
        """Doubt the verdicts of tests that fail without a mistake, too."""
        caught = {one.test for one in self.known.values() if one.outcome == "killed"}
        tests = sorted(test for test in caught if "::" in test)
        _, failed, _ = place.tests(tests, limit_s=3600) if tests else ("", [], 0.0)
        for name, one in self.known.items():
            if one.outcome == "killed" and one.test in failed:
                self.known[name] = replace(one, outcome="doubtful")
        self.save()
        print(f"{len(tests)} tests have caught something; without a mistake these fail:", failed)

    def save(self) -> None:
        """Write what is known so far."""
        rows = [asdict(each) for each in self.known.values()]
        rows.sort(key=lambda row: (*key(row["mutant"]), row["mutant"]["line"]))
        self.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_verdicts(path: Path) -> list[Verdict]:
    """The verdicts of a file of results on mistakes that could be seen."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    unseen = {key(one) for one in judged("equal")}
    return [
        Verdict(**row | {"mutant": Mutant(**row["mutant"])})
        for row in rows
        if key(row["mutant"]) not in unseen
    ]


def sample(count: int, seed: int) -> list[Slot]:
    """The sample, in an order in which all packages come alike: a run may be stopped."""
    files = packages()
    lines = {
        name: sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        for name, paths in files.items()
    }
    given = shares(count, lines)
    waiting = {name: iter(drawn_from(files[name], f"{seed}/{name}")) for name in files}
    turns = sorted((number / given[name], name) for name in given for number in range(given[name]))
    return [(name, waiting[name]) for _, name in turns]


def tables(verdicts: list[Verdict]) -> str:
    """The tables of the page: each package's mistakes, those not caught, and those set aside."""
    ran = [each for each in verdicts if each.outcome != "invalid"]
    by_package = Counter((each.mutant.package, each.outcome == "killed") for each in ran)
    rows = ["| package | mistakes | caught | not caught |", "|---|--:|--:|--:|"]
    for name in sorted({each.mutant.package for each in ran}):
        caught, missed = by_package[name, True], by_package[name, False]
        rows.append(f"| `{name}` | {caught + missed} | {caught} | {missed} |")
    caught = sum(each.outcome == "killed" for each in ran)
    rows.append(f"| all | {len(ran)} | {caught} | {len(ran) - caught} |")
    reasons = {key(one): one["reason"] for one in judged("left")}
    rows += ["", "| not caught | mistake | why |", "|---|---|---|"]
    for each in ran:
        if each.outcome != "killed":
            alive = f"no test had failed after {each.cpu_s:.0f} s of computing"
            unknown = alive if each.outcome == "alive" else "not looked at yet"
            why = reasons.get(key(asdict(each.mutant)), unknown)
            rows.append(f"| {place_of(each.mutant)} | {change_of(each.mutant)} | {why} |")
    rows += ["", "| set aside | mistake | why nobody could see it |", "|---|---|---|"]
    for one in judged("equal"):
        named = Mutant(one["file"], 0, 0, one["before"], one["after"], one["text"])
        rows.append(f"| {place_of(named)} | {change_of(named)} | {one['reason']} |")
    return "\n".join(rows)


def place_of(mutant: Mutant) -> str:
    """The file, as the page names it."""
    return f"`{mutant.file.removeprefix('src/')}`"


def change_of(mutant: Mutant) -> str:
    """The mistake, in a cell of a table."""

    def cell(text: str) -> str:
        one_line = " ".join(text.split()).replace("|", "\\|")
        return one_line if len(one_line) < 70 else f"{one_line[:50]} ... {one_line[-12:]}"

    before = cell(mutant.before)
    if mutant.after in ("pass", ";"):
        return f"without `{before}`"
    return f"`{before}` becomes `{cell(mutant.after)}`"


def main() -> None:
    """Judge a sample, and write what became of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--cpu-limit", type=float, default=200, help="seconds for each mistake")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="keep the verdicts of --out")
    parser.add_argument("--again", action="store_true", help="judge what was not caught once more")
    parser.add_argument("--only", default="", help="with --again: a part of the file's name")
    parser.add_argument("--first", nargs="*", default=[], help="tests that run before all others")
    parser.add_argument("--confirm", action="store_true", help="run only the tests that failed")
    parser.add_argument("--tables", action="store_true", help="print the page's tables of --out")
    arguments = parser.parse_args()
    known = read_verdicts(arguments.out)
    if arguments.tables:
        print(tables(known))
        return
    slots: list[Slot] = []
    if arguments.again:
        left = [
            each
            for each in known
            if each.outcome in ("survived", "alive", "doubtful")
            if arguments.only in each.mutant.file
        ]
        known = [each for each in known if each not in left]
        slots = [(each.mutant.package, iter([each.mutant])) for each in left]
    elif not arguments.confirm:
        known = known if arguments.resume else []
        slots = sample(arguments.count, arguments.seed)
    run = Run(arguments.out, known, arguments.cpu_limit, arguments.first)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(arguments.processes) as pool,
    ):
        places = [Workplace(Path(folder) / str(number)) for number in range(arguments.processes)]
        for running in [
            pool.submit(run.judge, slots, place, builds=place is places[0]) for place in places
        ]:
            running.result()
        if not arguments.again:
            run.confirm(places[0])
    outcomes = Counter((each.mutant.package, each.outcome) for each in run.known.values())
    print(*(f"{name} {outcome} {number}" for (name, outcome), number in sorted(outcomes.items())))


if __name__ == "__main__":
    main()
