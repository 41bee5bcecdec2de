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


def test_every_line_of_the_stub_exports_a_name_that_is_defined_in_its_module() -> None:
    stub = ast.parse(Path(penstock.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {line.names[0].asname: line.module for line in lines} == penstock.MODULE_OF
    assert len(lines) == len(penstock.__all__)
    for name, module in penstock.MODULE_OF.items():
        assert getattr(penstock, name).__module__ == module


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
