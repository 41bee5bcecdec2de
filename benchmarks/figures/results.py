"""Result files and scripts of benchmarks, each read once."""

import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["BENCHMARKS", "ROOT", "beside", "git", "results", "script"]

BENCHMARKS = Path(__file__).parent.parent
ROOT = BENCHMARKS.parent


def git(*arguments: str) -> str:
    """What a command of git prints in this repository.

    Raises:
        CalledProcessError: there is no history here, or it does not have what is asked for.
    """
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@cache
def results(name: str) -> Any:
    """What ``benchmarks/NAME`` holds; of ``NAME@COMMIT``, what it held then."""
    path, _, commit = name.partition("@")
    if commit:
        text = git("show", f"{commit}:benchmarks/{path}")
    else:
        text = (BENCHMARKS / path).read_text(encoding="utf-8")
    return tomllib.loads(text) if path.endswith(".toml") else json.loads(text)


@cache
def script(path: str) -> Any:
    """The script ``benchmarks/PATH`` as a module."""
    file = BENCHMARKS / path
    name = "figures_of_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with beside(file.parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Here scripts find those of ``folder``.

    None of their modules stays behind: names such as `tables` are used in several folders.
    """
    paths, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = paths
        for new in set(sys.modules) - modules:
            if str(BENCHMARKS) in str(getattr(sys.modules[new], "__file__", "")):
                del sys.modules[new]
