"""Ranks that share one GPU train as one process: every kind of schedule, and models of all kinds.

Their messages go through memory that they share, and their sums over Gloo.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from gpu_device import DEVICE
from runtime.matrix_cases import play
from runtime.matrix_plans import Case, torchrun_cases

from penstock.runtime.processes.launch import launch_workers

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(240)]

MODELS = ("gpt2", "llama", "t5", "convolutions", "resnet")


def wrong_in(cases: Sequence[Any], ranks: int) -> dict[str, list[str]]:
    results = launch_workers(play, (tuple(cases), DEVICE), workers=ranks, threads=1)
    return {
        str(case): [what for found in results for what in found[case]][:5]
        for case in cases
        if any(found[case] for found in results)
    }


def test_every_kind_of_schedule() -> None:
    assert not wrong_in(list(torchrun_cases(4, "shared-memory")), 4)


def test_models() -> None:
    options: dict[str, Any] = {"micro_batch_rows": 4, "transport": "shared-memory"}
    cases = [
        Case("1f1b", replicas, 5, model=model, recompute=len(replicas) == 1, **options)
        for model in MODELS
        for replicas in ((1, 1), (2,))
    ]
    assert not wrong_in(cases, 2)


def test_dropout_and_autocast() -> None:
    options: dict[str, Any] = {"micro_batch_rows": 4, "transport": "shared-memory"}
    cases = [
        Case("1f1b", (1, 1), 5, model="dropping", dropout=True, recompute=True, **options),
        Case("zb-h1", (1, 1), 5, model="gpt2", autocast=True, **options),
    ]
    assert not wrong_in(cases, 2)
