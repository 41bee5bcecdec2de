"""Ranks that share a GPU send by shared memory, or are told why they cannot."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import BadInput
from penstock.runtime.transport.open_transport import open_transport


def world(*hosts: str) -> Any:
    """Two ranks on GPUs with the same number."""
    return SimpleNamespace(
        size=2,
        rank=0,
        hosts=hosts,
        devices=("cuda:0", "cuda:0"),
        device=torch.device("cuda", 0),
        one_host=len(set(hosts)) == 1,
        backend="gloo",
        sharing="ranks 0, 1 share one GPU",
    )


def test_process_groups_are_refused() -> None:
    with pytest.raises(
        BadInput, match=r"ranks 0, 1 share one GPU, .* whose memory Gloo cannot send"
    ):
        open_transport(world("one", "one"), "process-groups", [[], []])
