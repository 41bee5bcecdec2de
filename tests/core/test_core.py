"""The core belongs to the package, its stub to the core; and the build says what it lacks."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scripts import ROOT

from penstock.core import check_core, digest_of_sources, native
from penstock.errors import BadInput

BACKEND = ROOT / "build_backend"


def test_a_core_of_another_version_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"^the compiled core is of version 0\.0\.9 and") as said:
        check_core("0.0.9", native.sources)
    assert "\n" not in str(said.value)


def test_a_core_of_other_sources_is_refused_only_where_there_are_sources(tmp_path: Path) -> None:
    check_core(native.version, "made from other files", tmp_path)
    (tmp_path / "bind.cpp").write_text("int main() {}\n")
    check_core(native.version, digest_of_sources(tmp_path), tmp_path)
    with pytest.raises(BadInput, match=r"other C\+\+ files than .*; run: pip install -e"):
        check_core(native.version, native.sources, tmp_path)


def test_the_stub_has_the_names_of_the_core() -> None:
    stub = ast.parse((Path(native.__file__).with_name("native.pyi")).read_text(encoding="utf-8"))
    assert names_in(stub) == {name for name in vars(native) if not name.startswith("__")}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            members = {name for name in vars(getattr(native, node.name)) if name[:2] != "__"}
            assert names_in(node) - {"__init__"} == members, node.name


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (1 << 4, "an action has no instance"),
        (2 << 24, "no instance or micro-batch"),
        (-1 << 24, "no instance or micro-batch"),
        (6, "only two streams wait"),
    ],
)
def test_words_that_lead_nowhere_are_refused(word: int, why: str) -> None:
    start, words = np.array([0, 1]), np.array([word])
    with pytest.raises(ValueError, match=why):
        native.Orders(start, words, 1, (0,), (1,), (2, 1), ())
    with pytest.raises(ValueError, match="must cover all"):
        native.Orders(np.array([0, 2]), np.array([0]), 1, (0,), (1,), (2, 1), ())
    with pytest.raises(ValueError, match="equally many"):
        native.Orders(start, np.array([0]), 1, (0,), (1,), (2, 3), ())
    with pytest.raises(ValueError, match="each instance has a group and its rounds"):
        native.Orders(start, np.array([0]), 1, (0, 0), (1,), (2, 1), ())


def names_in(node: ast.Module | ast.ClassDef) -> set[str]:
    """The names that a stub defines."""
    found: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.add(statement.target.id)
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
            found.add(statement.name)
    return found


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("sysconfig.get_path = lambda name: '/nowhere'", "install Python's headers, on Debian"),
        ("penstock_build.find_spec = lambda name: None", "install a C++ compiler"),
    ],
    ids=["no headers", "no compiler"],
)
def test_what_a_build_lacks_is_said_in_one_sentence(change: str, wanted: str) -> None:
    """With stand-ins for scikit-build-core, which only a build has."""
    program = (
        "import sys, types, sysconfig\n"
        "names = ('scikit_build_core', 'scikit_build_core.build')\n"
        "sys.modules |= {name: types.ModuleType(name) for name in names}\n"
        "sys.modules[names[0]].build = sys.modules[names[1]]\n"
        "import penstock_build\n"
        f"{change}\n"
        "penstock_build.compiler = lambda: ''\n"
        "penstock_build.build_wheel('/nowhere')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(BACKEND)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "no C++20" not in line]
    assert line.startswith("penstock has a compiled core") and wanted in line


def test_what_is_kept_to_the_end_of_a_process_is_not_complained_about() -> None:
    program = (
        "import sys\n"
        "from penstock.core.native import HostRules\n"
        "sys.kept = HostRules(1, False, False)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
