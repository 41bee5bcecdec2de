"""Hosts as network namespaces, which the benchmarks make, for tests that need hosts."""

import pytest
from scripts import ROOT, script_at

from penstock.errors import BadInput

FOLDER = ROOT / "benchmarks" / "rehearsal"
host_networks = script_at("benchmarks/rehearsal/host_networks.py", "host_networks")


def refusal() -> str:
    """Why this process cannot make network namespaces; empty if it can."""
    try:
        host_networks.ready_network()
    except BadInput as why:
        return str(why)
    return ""


REFUSAL = refusal()
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
