"""Asynchronous training over real processes gives the weights of the definitions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.asynchronous_training import METHODS
from runtime.asynchronous.asynchronous_cases import OPTIMIZERS, assert_equal_histories, defined
from runtime.asynchronous.asynchronous_ranks import histories, interrupted, uses

from penstock.runtime.processes.launch import launch_workers

BATCHES = 5


def assert_as_defined(found: tuple[dict[Any, Any], ...], replicas: int = 1) -> None:
    stages = len(found) // replicas
    for case in found[0]:
        method, optimizer, micro_batches, count, *_ = case
        expected = defined(method, stages, OPTIMIZERS[optimizer], count * micro_batches)
        for rank, own in enumerate(found):
            assert_equal_histories([own[case][0]], [expected[rank // replicas]])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_method_gives_the_weights_of_its_definition(ranks: int) -> None:
    cases = [(m, "adamw", 2 * ranks, BATCHES, 1, False, "auto") for m in METHODS]
    # Batches of one micro-batch: the pipeline is filled by several of them.
    cases += [(m, "momentum", 1, 11, 1, False, "auto") for m in ("pipedream", "spectrain")]
    cases += [("2bw", "adam", 2 * ranks, BATCHES, 1, False, "process-groups")]
    found = launch_workers(histories, (cases,), workers=ranks)
    assert_as_defined(found)
    for case in cases:
        # The loss is that of the same weights on all ranks, and there is one for each batch.
        assert all(own[case][1] == found[0][case][1] for own in found)
        assert len(found[0][case][1]) == case[3]


def test_replicas_and_recompute_change_nothing() -> None:
    cases = [
        ("pipedream", "adamw", 4, BATCHES, 2, False, "auto"),
        ("spectrain", "momentum", 4, BATCHES, 2, False, "auto"),
        ("2bw", "momentum", 4, BATCHES, 2, True, "auto"),
        ("pipedream", "momentum", 4, BATCHES, 2, True, "process-groups"),
    ]
    assert_as_defined(launch_workers(histories, (cases,), workers=4), replicas=2)


def test_a_resumed_run_goes_on_as_the_one_that_was_saved(tmp_path: Path) -> None:
    for found in launch_workers(interrupted, (tmp_path,), workers=3):
        losses, weights = found["through"]
        start, resumed, again = found["resumed"]
        # The batch behind the one whose metrics were seen was under way.
        assert start == found["saved at"] == 6
        assert resumed == losses[6:]
        assert np.array_equal(weights, again)


def test_whatever_needs_weights_at_rest_runs_the_pipeline_empty() -> None:
    for found in launch_workers(uses, (), workers=3):
        assert found["steps"] == [1, 2, 3]
        assert found["alone"] == 4
        assert found["short"] == [8, 6, 8]
        assert found["equal"]
        assert len(found["evaluated"]) == 3
        assert {"F", "B", "STEP", "SEND", "RECV"} <= found["events"]
