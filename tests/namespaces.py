"""Whether this process can make network namespaces, for tests that need hosts."""

import pytest

from penstock.errors import BadInput
from penstock.rehearse.host_networks import ready_network

__all__ = ["needs_namespaces"]


def refusal() -> str:
    """Why this process cannot make network namespaces; empty if it can."""
    try:
        ready_network()
    except BadInput as why:
        return str(why)
    return ""


REFUSAL = refusal()
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
