"""Break one line after another, and see whether a test fails; docs/benchmarks/tests.md has a run.

    python benchmarks/mutation.py --count 160 --seed 1 --out mutants.json

Each mutant is a copy of the sources with one small mistake in one file: another comparison, sign,
constant or truth value, `min` for `max`, a statement left out. The fast tests of its package run
until the first fails: the examples of its docstrings first, then the tests of its own name. A
mutant that no test fails on has survived, and wants looking at; so does one on which no test has
failed after `CPU_LIMIT_S` seconds of computing.

The sample is drawn by its seed alone: every place in the sources where a mistake can be made is as
likely as every other.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL, SIGXCPU

ROOT = Path(__file__).parents[1]
PACKAGES = ("schedule", "simulate", "planners", "bounds")
CPU_LIMIT_S = 30

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
    """A mistake: ``after`` in the place of ``before``, which starts at a line and a column."""

    file: str
    line: int
    column: int
    before: str
    after: str


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the first test that failed on it, or how it ended otherwise."""

    mutant: Mutant
    outcome: str
    test: str
    cpu_s: float


def mistakes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    changed: ast.AST = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[only]) if type(only) in COMPARISONS:
            changed.ops = [COMPARISONS[type(only)]()]
            yield changed
        case ast.BinOp(op=sign) if type(sign) in SIGNS:
            changed.op = SIGNS[type(sign)]()
            yield changed
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            yield changed
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in OTHERS:
            changed.func = ast.Name(OTHERS[name])
            yield changed
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
    found: list[Mutant] = []
    for node in places(ast.parse(text)):
        for mistake in mistakes(node):
            before = ast.get_source_segment(text, node) or ""
            after = ast.unparse(ast.fix_missing_locations(mistake))
            if not isinstance(node, ast.Constant | ast.stmt):
                after = f"({after})"
            file = str(path.relative_to(ROOT))
            found.append(Mutant(file, node.lineno, node.col_offset, before, after))  # type: ignore[attr-defined]
    return found


def drawn(count: int, seed: int) -> list[Mutant]:
    """The sample: as many, wherever they lie."""
    files = [f for name in PACKAGES for f in sorted((ROOT / "src/penstock" / name).rglob("*.py"))]
    every = [mutant for path in files for mutant in mutants_of(path)]
    random.Random(seed).shuffle(every)
    return every[:count]


def with_mistake(text: str, mutant: Mutant) -> str:
    """A file's text with the mistake."""
    lines = text.splitlines(keepends=True)
    at = sum(map(len, lines[: mutant.line - 1]))
    # Columns of syntax trees count bytes.
    at += len(lines[mutant.line - 1].encode()[: mutant.column].decode())
    assert text[at:].startswith(mutant.before)
    return text[:at] + mutant.after + text[at + len(mutant.before) :]


def tests_for(mutant: Mutant) -> list[str]:
    """The module itself, for its examples, then the tests of its package, of its name first."""
    path = Path(mutant.file)
    package = path.parts[2]
    names = [part.split("_") for part in path.with_suffix("").parts[3:]]
    words = {word.rstrip("s") for name in names for word in name}
    files = sorted((ROOT / "tests" / package).glob("test_*.py"))

    def unlike(file: Path) -> int:
        return -len(words & {word.rstrip("s") for word in file.stem.split("_")[1:]})

    return [mutant.file, *(str(f.relative_to(ROOT)) for f in sorted(files, key=unlike))]


def judged(mutant: Mutant, place: Path) -> Verdict:
    """Make the mistake in the copy, run the tests, and undo it."""
    path = place / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(with_mistake(text, mutant), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "PYTHONPATH": str(place / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            [*command, *tests_for(mutant)],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S,) * 2),
        )
        failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
        outcome = {0: "survived", -SIGXCPU: "alive", -SIGKILL: "alive"}.get(
            done.returncode, "killed"
        )
        test = failed[0].split(" - ")[0].partition(" ")[2] if failed else ""
    finally:
        path.write_text(text, encoding="utf-8")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Verdict(mutant, outcome, test, round(cpu_s, 1))


def main() -> None:
    """Judge a sample, and write what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    arguments = parser.parse_args()
    sample = drawn(arguments.count, arguments.seed)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("src", "tests", "docs", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)
        for number, mutant in enumerate(sample, 1):
            verdicts.append(judged(mutant, place))
            last = verdicts[-1]
            where = f"{mutant.file.removeprefix('src/penstock/')}:{mutant.line}"
            change = f"{mutant.before!r} -> {mutant.after!r}"
            print(number, last.outcome, f"{last.cpu_s} s", where, change, last.test, flush=True)
            arguments.out.write_text(json.dumps([asdict(each) for each in verdicts], indent=1))
    print(Counter((each.mutant.file.split("/")[2], each.outcome) for each in verdicts))


if __name__ == "__main__":
    main()
