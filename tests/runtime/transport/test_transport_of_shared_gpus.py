"""Ranks that share a GPU send by shared memory, or are told why they cannot."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import BadInput
from penstock.runtime.transport.open_transport import open_transport


def test_process_groups_are_refused() -> None:
    sharing = "ranks 0, 1 share one GPU"
    world: Any = SimpleNamespace(size=2, one_host=True, backend="gloo", sharing=sharing)
    with pytest.raises(BadInput, match=f"{sharing}, .* whose memory Gloo cannot send"):
        open_transport(world, "process-groups", [[], []])
