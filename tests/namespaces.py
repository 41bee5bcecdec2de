"""Hosts as network namespaces, which the benchmarks make, for tests that need hosts."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from penstock.errors import BadInput

FOLDER = Path(__file__).parents[1] / "benchmarks" / "rehearsal"


def loaded(name: str) -> ModuleType:
    """A module of the benchmark, whose folder would hide the tests' own if it were on the path."""
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


host_networks = loaded("host_networks")


def refusal() -> str:
    """Why this process cannot make network namespaces; empty if it can."""
    try:
        host_networks.ready_network()
    except BadInput as why:
        return str(why)
    return ""


REFUSAL = refusal()
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
