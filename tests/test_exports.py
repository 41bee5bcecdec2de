import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(penstock, name).__name__ == name
    assert name in dir(penstock)


def test_no_exported_name_is_also_a_package() -> None:
    packages = {module.name for module in pkgutil.iter_modules(penstock.__path__)}
    assert packages >= {"plan", "simulate", "profile"}
    assert not packages & set(penstock.__all__)


def test_exported_names_are_those_that_type_checkers_see() -> None:
    source = Path(penstock.__file__).read_text(encoding="utf-8")
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    seen = {
        (alias.name, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(penstock.MODULE_OF.items())
    assert sorted(penstock.MODULE_OF) == sorted(penstock.__all__)


def test_a_name_that_is_not_exported_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plan_pipelin'"):
        _ = penstock.plan_pipelin  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "statement",
    [
        "import penstock",
        "from penstock import plan_pipeline, simulate_plan, read_cluster, write_report",
        "import penstock.cli",
    ],
)
def test_importing_what_needs_no_torch_does_not_load_it(statement: str) -> None:
    check = f"{statement}; import sys; assert 'torch' not in sys.modules, 'torch is loaded'"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
