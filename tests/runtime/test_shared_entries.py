"""Entries of a batch that all samples share: ranks train as one process does."""

from typing import Any

import pytest
import torch
from runtime import shared_cases

from penstock.runtime.processes.launch import launch_workers


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch_workers(shared_cases.every_plan, (), workers=3, threads=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["", ", parts"])
@pytest.mark.parametrize("name", shared_cases.PLANS)
def test_losses_weights_and_evaluation_are_those_of_one_process(
    found: list[dict[str, Any]], name: str, way: str
) -> None:
    expected = shared_cases.alone()
    weights: dict[str, torch.Tensor] = {}
    for rank in found:
        own = rank[f"{name}{way}"]
        assert own["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert own["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-10)
        weights |= own["weights"]
    assert weights.keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-8, atol=1e-10)


def test_a_shared_entry_of_another_size_is_refused_on_every_rank(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        words = rank["unequal replicas"]["refused"]
        assert "batch['places'] has shape (7, 2): dimension 0 is 7, but was 6" in words
