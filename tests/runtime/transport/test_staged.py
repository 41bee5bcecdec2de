"""Ranks of one GPU by the staged transport, in real processes, with copies that are late."""

from collections.abc import Sequence
from typing import Any

from runtime.matrix_plans import Case, representative
from runtime.transport.staged_cases import play_staged

from penstock.runtime.processes.launch import launch_workers


def wrong_in(cases: Sequence[Any], slot_limit: int | None = None) -> dict[str, list[str]]:
    arguments = tuple(cases), slot_limit
    results = launch_workers(play_staged, arguments, workers=4, threads=1)
    assert sum(launched for launched, _ in results) > 2 * len(cases)
    return {str(case): wrong[:5] for _, found in results for case, wrong in found.items() if wrong}


def test_every_schedule_trains_as_one_process() -> None:
    cases = {case.schedule: case for case in representative()}
    assert not wrong_in(list(cases.values()))


def test_full_rings_and_replicas_that_wait_for_one_another_in_a_forward() -> None:
    """Statistics of a batch are summed over Gloo, where nobody looks at the rings."""
    options: dict[str, Any] = {"micro_batch_rows": 4}
    cases = [
        Case(schedule, replicas, 5, model=model, **options)
        for schedule in ("1f1b", "gpipe", "zb-h1")
        for model, replicas in (("resnet", (2, 2)), ("gpt2", (1, 2, 1)))
    ]
    assert not wrong_in(cases, 64)
