"""Evaluations and predictions are those of the model in evaluation mode, on a path of its own."""

import pytest
from runtime.evaluation.path_cases import CASES, every_case, failures_in_turn

from penstock.runtime.processes.launch import launch_workers


@pytest.mark.timeout(600)
def test_evaluation_takes_its_own_path_and_changes_nothing() -> None:
    for rank, found in enumerate(launch_workers(every_case, workers=2, threads=1)):
        assert len(found) == len(CASES)
        assert not any(found.values()), f"rank {rank}: {found}"


def test_a_failed_evaluation_leaves_the_pipeline_usable() -> None:
    for rank, found in enumerate(launch_workers(failures_in_turn, workers=2, threads=1)):
        places = ["forward", "loss", "metric"]
        for place, message in zip(places, found, strict=True):
            assert f"stage 1, F0: {place} fails" in message, f"rank {rank}: {message}"
