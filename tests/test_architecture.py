import ast
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import grimp
import networkx
import pytest

import penstock

Node = TypeVar("Node", bound=ast.AST)

SOURCE = Path(penstock.__file__).parent
ROOT = SOURCE.parent.parent
MODULES = sorted(SOURCE.rglob("*.py"))
PURE = (
    "core",
    "cluster",
    "profile",
    "schedule",
    "timeline",
    "plan",
    "planners",
    "costs",
    "simulate",
    "advice",
    "report",
    "integrations/bridges",
)

MOST_PARAMETERS = 8
MOST_ATTRIBUTES_OF_A_CLASS = 25
MOST_LINES_OF_CODE_OF_A_CLASS = 400

NAMES_GIVEN = {"capture": 90, "plan": 73, "costs": 40, "schedule": 31, "runtime": 75}
"""Names of a package that modules of others import, at most; lower them where fewer do."""

NAMES_DEFINED_TWICE = 5
"""Public functions and classes that several modules define, at most."""

PUBLIC_AND_BY_NAME = {
    "capture/capture.py: capture_model",
    "runtime/pipeline.py: Pipeline.__init__",
    "advice/plan_pipeline.py: plan_pipeline",
    "planners/problem.py: planning_problem",
}
"""Users write these calls; all but the first three arguments are given by name."""

COMMANDS = {
    "commands/cluster_commands.py: launch",
    "commands/choose_command.py: choose",
    "commands/bridge_commands.py: import_layout",
    "commands/compare_command.py: compare",
    "commands/job_commands.py: train",
    "commands/planning_commands.py: plan",
    "commands/rehearse_command.py: rehearse",
    "commands/simulate_command.py: simulate",
}
"""typer reads the options of a command from its parameters."""

CUDA_OF_TORCH = ("torch.cuda", "torch.accelerator", "torch.backends")
USERS_WORD_FOR_CUDA = {
    "commands/cluster_commands.py",
    "commands/options.py",
    "capture/loss/loss_parts.py",
}

SIGNATURES_OF_TORCH = {
    "runtime/stage/batch_norm.py: operator_call",
    "runtime/stage/batch_norm.py: Normalise.forward",
}
"""torch calls these: one stands for an operator of it, the other is an autograd function."""

READS_THE_CLOCK = {SOURCE / "advice" / "plan_pipeline.py"}
"""The public call: its time limit begins with it."""

INTERNALS = SOURCE / "torch_internals.py"

PRIVATE_OF_OTHERS = {
    *("_exit", "_getframe", "_fields", "_replace"),
    *("_forkserver", "_forkserver_pid", "_preload_modules"),
    "_init_weights",
    *("_accelerator_connector", "_should_accumulate"),
    *("_compute_loss", "_total_train_tokens"),
}
"""Names that are private and not torch's: Python's, a user's model's, Lightning's, TRL's."""

NAMES_THAT_SAY_NOTHING = {"base", "common", "core", "helpers", "misc", "tools", "util", "utils"}


def own_private_names(path: Path) -> Iterator[str]:
    """What a module defines: functions, classes, constants, attributes of ``self``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def place_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(kind: type[Node]) -> Iterator[tuple[Path, Node]]:
    """All nodes of a kind in the package, each with its file."""
    for path in MODULES:
        yield from ((path, node) for node in ast.walk(tree_of(path)) if isinstance(node, kind))


def test_imports_point_down() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_pure_packages_import_without_torch() -> None:
    names = [
        module.name
        for package in PURE
        for module in pkgutil.walk_packages(
            [str(SOURCE / package)], f"penstock.{package.replace('/', '.')}."
        )
    ]
    assert len(names) > 30
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_modules_import_one_another() -> None:
    graph = grimp.build_graph("penstock", exclude_type_checking_imports=False)
    imports = networkx.DiGraph(
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )
    circles = [c for c in networkx.strongly_connected_components(imports) if len(c) > 1]
    found = {shared_package(circle): len(circle) for circle in circles}
    print("modules of a package that import one another:", found)
    assert found == {}


def shared_package(modules: Iterable[str]) -> str:
    return os.path.commonpath([name.replace(".", "/") for name in modules]).replace("/", ".")


def test_a_package_gives_few_names_to_others() -> None:
    given: dict[str, set[str]] = {package: set() for package in NAMES_GIVEN}
    for path, node in nodes(ast.ImportFrom):
        package = (node.module or "").removeprefix("penstock.").partition(".")[0]
        if package in given and package != path.relative_to(SOURCE).parts[0]:
            given[package] |= {alias.name for alias in node.names}
    counts = {package: len(names) for package, names in given.items()}
    print("names given to other packages:", counts)
    assert all(counts[package] <= most for package, most in NAMES_GIVEN.items())


def test_few_names_are_defined_twice() -> None:
    modules: dict[str, set[str]] = {}
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                modules.setdefault(node.name, set()).add(place_of(path))
    twice = [name for name, places in modules.items() if len(places) > 1]
    print("names that several modules define:", len(twice))
    assert len(twice) <= NAMES_DEFINED_TWICE


def test_a_class_holds_few_attributes_and_little_code() -> None:
    large = {
        f"{place_of(path)}: {node.name}"
        for path, node in nodes(ast.ClassDef)
        if len(assigned_attributes(node)) > MOST_ATTRIBUTES_OF_A_CLASS
        or lines_of_code(path, node) > MOST_LINES_OF_CODE_OF_A_CLASS
    }
    print("large classes:", *sorted(large), sep="\n")
    assert large == set()


def assigned_attributes(node: ast.ClassDef) -> set[str]:
    """The different attributes of ``self`` to which any method assigns."""
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.ctx, ast.Store)
        and ast.unparse(found.value) == "self"
    }


def lines_of_code(path: Path, node: ast.ClassDef) -> int:
    """The lines of a class that are neither docstrings nor blank nor comments."""
    texts = path.read_text(encoding="utf-8").splitlines()
    left = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for owner in ast.walk(node):
        if isinstance(owner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = owner.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                left -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(bool(texts[n - 1].strip()) and texts[n - 1].strip()[0] != "#" for n in left)


def test_a_function_has_few_parameters() -> None:
    many = {name for name, count in parameters_in_the_project() if count > MOST_PARAMETERS}
    assert many == PUBLIC_AND_BY_NAME | COMMANDS | SIGNATURES_OF_TORCH


def test_public_calls_with_many_parameters_take_them_by_name() -> None:
    by_place = {name: function for path in MODULES for name, function in named_functions(path)}
    for name in PUBLIC_AND_BY_NAME:
        arguments = by_place[name].args
        positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg != "self"]
        assert len(positional) <= 3, name


def parameters_in_the_project() -> Iterator[tuple[str, int]]:
    """Every function with its number of parameters; the object of a method does not count."""
    for path in MODULES:
        for name, function in named_functions(path):
            arguments = function.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            yield name, sum(argument.arg not in ("self", "cls") for argument in every)


def named_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module, methods with the name of their class in front."""
    tree = tree_of(path)
    owners = {
        id(member): f"{node.name}."
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for member in node.body
    }
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield f"{place_of(path)}: {owners.get(id(function), '')}{function.name}", function


COSTS_OF_A_LAYER = {"forward_s", "backward_input_s", "backward_weight_s", "saved_bytes"}
"""Costs that only some rooms read; schedules have stages with costs of the same names."""

READ_OF_A_LAYER = {
    "commands/job_commands.py": "the sum of a new profile, as its summary",
    "planners/bapipe/bapipe.py": "BaPipe balances layers by seconds of its own count",
    "planners/pinned.py": "bytes of a layer, to number pinned stages before there is any stage",
    "planners/tensor_groups.py": "makes the profile of one rank of a tensor group",
}
"""Files that read the costs of layers all the same, and why."""

READ_OF_OTHERS = {
    "measure/layer_times.py": "passes that were measured, of which a profile is made",
    "planners/dapple/dapple.py": "costs of stages, from the core",
    "advice/explain.py": "an explained step",
    "planners/spp/bound.py": "messages between two replicas",
    "simulate/workload.py": "messages between two replicas",
}
"""Files in which something else has a cost of the same name."""


def test_the_costs_of_layers_are_read_in_the_rooms_of_costs() -> None:
    rooms = ("core", "costs", "profile", "schedule")
    readers = {
        place_of(path)
        for path, node in nodes(ast.Attribute)
        if node.attr in COSTS_OF_A_LAYER and place_of(path).split("/")[0] not in rooms
    }
    print(*(f"{file}: {why}" for file, why in READ_OF_A_LAYER.items()), sep="\n")
    assert readers == READ_OF_A_LAYER.keys() | READ_OF_OTHERS.keys()


def test_every_module_says_what_it_is() -> None:
    assert [place_of(path) for path in MODULES if not ast.get_docstring(tree_of(path))] == []


def test_everything_that_other_modules_import_is_documented() -> None:
    imported = {
        (node.module, alias.name) for _, node in nodes(ast.ImportFrom) for alias in node.names
    }
    silent = [
        f"{place_of(path)}: {node.name}"
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and (module_at(path), node.name) in imported
        and not ast.get_docstring(node)
    ]
    assert silent == []


def module_at(path: Path) -> str:
    """The name by which a file is imported."""
    return ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))


def test_one_file_names_what_is_private_in_torch() -> None:
    """Elsewhere, private names are the project's own, or known to be no names of torch."""
    kept = {name for name, _ in private_names(INTERNALS)}
    assert {"_C", "_pytree", "_buffers", "_compiled_call_impl", "_dynamo"} < kept
    ours = {name for path in MODULES for name in own_private_names(path)}
    elsewhere = [
        (place_of(path), name, in_text)
        for path in MODULES
        if path != INTERNALS
        for name, in_text in private_names(path)
    ]
    assert [f"{place}: {name}" for place, name, _ in elsewhere if name in kept] == []
    unknown = {name for _, name, in_text in elsewhere if not in_text and name not in ours}
    assert unknown == PRIVATE_OF_OTHERS


def private_names(path: Path) -> Iterator[tuple[str, bool]]:
    """The private names of other objects in a module; with True, those in its texts."""
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [part for alias in node.names for part in alias.name.split(".")]
            names += ((isinstance(node, ast.ImportFrom) and node.module) or "").split(".")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = node.value.split(".")
        in_text = isinstance(node, ast.Constant)
        yield from ((n, in_text) for n in names if n.startswith("_") and not n.startswith("__"))


def test_one_file_names_cuda() -> None:
    """Others ask it; commands and recorded calls have only users' word for it."""
    attributes, constants = nodes(ast.Attribute), nodes(ast.Constant)
    calls = {place_of(path) for path, node in attributes if ast.unparse(node) in CUDA_OF_TORCH}
    words = {place_of(path) for path, node in constants if node.value == "cuda"}
    assert calls == {"device.py"}
    assert words == {"device.py", *USERS_WORD_FOR_CUDA}


def test_modules_are_named_after_their_concepts() -> None:
    assert [place_of(path) for path in MODULES if path.stem in NAMES_THAT_SAY_NOTHING] == []


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path, node in nodes(ast.ClassDef):
        places.setdefault(node.name, []).append(place_of(path))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_read_no_clock_no_environment_and_print_nothing(package: str) -> None:
    for path in {*(SOURCE / package).rglob("*.py")} - READS_THE_CLOCK:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                assert not names & {"time", "random", "logging"}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("time", "random", "logging"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv"), path


def test_the_command_line_is_a_short_file() -> None:
    assert len((SOURCE / "cli.py").read_text().splitlines()) < 300


def test_the_packaged_page_is_complete() -> None:
    kinds = {path.suffix for path in (SOURCE / "report" / "assets").iterdir()}
    assert kinds == {".html", ".css", ".js"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


NO_FIRST_WORD = re.compile(r"(What|Whether|How|Within|Where|Which)\b")
SPOKEN = re.compile(
    r"\b(tells?(?!\(\))|told|asks?|asked|anew|so many|alike|is meant|lets? go|of one another"
    r"|goes on|seldom|mended|stand-in)\b"
)
CODE_SPAN = re.compile(r"``[^`]*``|`[^`]*`")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Those of constants and fields too."""
    wrong = [
        f"{place_of(path)}:{node.lineno}: {text.partition(chr(10))[0]}"
        for path, node in nodes(ast.Expr)
        for text in [node.value.value if isinstance(node.value, ast.Constant) else ""]
        if isinstance(text, str) and NO_FIRST_WORD.match(text)
    ]
    assert "\n".join(wrong) == ""


FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_code_and_pages_use_the_nouns_of_the_field() -> None:
    written = {".py", ".pyi", ".cpp", ".hpp", ".md", ".html", ".js", ".toml"}
    found = [path for of in ("src", "docs") for path in (ROOT / of).rglob("*.*")]
    wrong = [
        f"{path.relative_to(ROOT)}: {word[0]}"
        for path in (*found, ROOT / "README.md", ROOT / "CHANGELOG.md")
        if path.suffix in written
        for text in (FENCED.sub("", path.read_text(encoding="utf-8")),)
        for word in SPOKEN.finditer(CODE_SPAN.sub("", text))
    ]
    assert "\n".join(sorted(wrong)) == ""
