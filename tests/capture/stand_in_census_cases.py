"""The census as tests judge it: here, and in a process of its own on a stand-in GPU."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stand_in_gpu

CENSUS = Path(__file__).parent.parent.parent / "benchmarks" / "models"


def judging() -> Any:
    """The module that judges architectures."""
    sys.path.insert(0, str(CENSUS))
    try:
        return importlib.import_module("judging")
    finally:
        sys.path.remove(str(CENSUS))


def judged(named: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """The rows of architectures, each given with its head, whose stages run on a GPU."""
    import transformers

    stand_in_gpu.install(1)
    warnings.simplefilter("ignore")
    judge = judging().judge
    return {name: judge(getattr(transformers, name), head, "cuda:0") for name, head in named}
