"""Ranks of one GPU by the staged transport, in real processes, with copies that are late."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.matrix_plans import ONE_OF_EACH_KIND, Case, representative
from runtime.transport.staged_cases import play_on_one_gpu, play_staged

from penstock.errors import RunFailed
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.transport.shared_memory.staged import Copy, CopyThread
from penstock.schedule.registry import FAMILIES


def wrong_in(cases: Sequence[Any], slot_limit: int | None = None) -> dict[str, list[str]]:
    arguments = tuple(cases), slot_limit
    results = launch_workers(play_staged, arguments, workers=4, threads=1)
    assert sum(launched for launched, _ in results) > 2 * len(cases)
    return {str(case): wrong[:5] for _, found in results for case, wrong in found.items() if wrong}


def test_schedules_train_as_one_process() -> None:
    cases = {case.schedule: case for case in representative()}
    assert not wrong_in([cases[schedule] for schedule in ONE_OF_EACH_KIND])


def test_full_rings_and_replicas_that_wait_for_one_another_in_a_forward() -> None:
    """Statistics of a batch are summed over Gloo, where nobody looks at the rings."""
    options: dict[str, Any] = {"micro_batch_rows": 4}
    cases = [
        Case(schedule, replicas, 5, model=model, **options)
        for schedule in ("1f1b", "zb-h1")
        for model, replicas in (("resnet", (2, 2)), ("gpt2", (1, 2, 1)))
    ]
    assert not wrong_in(cases, 64)


def test_on_stand_in_gpus_the_host_waits_for_no_copy() -> None:
    options: dict[str, Any] = {"micro_batch_rows": 4}
    cases = [
        Case("1f1b", (1, 1), 5, model="gpt2", **options),
        Case("zb-h1", (1, 1), 5, model="llama", **options),
        Case("gpipe", (1, 1), 5, model="t5", recompute=True, **options),
        Case("interleaved", (1, 1), 4, 2, FAMILIES["interleaved"].placement, **options),
    ]
    results = launch_workers(play_on_one_gpu, (tuple(cases),), workers=2, threads=1)
    for launched, found, waits in results:
        assert launched > 2 * 5 * len(cases)
        assert {str(case): wrong[:3] for case, wrong in found.items() if wrong} == {}
        assert waits == []


def test_the_error_of_a_copy_is_raised_where_the_rank_waits() -> None:
    """The thread ends, and what it had not published stays so."""

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    published: list[int] = []
    mark: Any = SimpleNamespace(synchronize=fails, query=lambda: True)
    own: Any = SimpleNamespace(words=[0] * 8)
    copies = CopyThread("test", own, lambda: False)
    with copies.changed:
        copies.under_way.append(Copy(mark, lambda: published.append(1), torch.zeros(1)))
        copies.changed.notify()
    assert copies.close(10.0)
    with pytest.raises(RunFailed, match="a message could not be copied: CUDA error: an illegal"):
        copies.has_work()
    assert not published
