"""A rank that fails, dies or hangs ends all ranks within seconds, each naming the cause."""

from pathlib import Path

import pytest
import torch
from runtime.processes.rank_processes import run_ranks
from runtime.training_cases import fail_at_rank_one

from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.world import World

TRANSPORTS = ("shared-memory", pytest.param("process-groups", marks=pytest.mark.slow))
END_S = 10.0
START_S = 240.0
STAGES = (1, 1, 1)


def outcomes(deed: str, transport: str, directory: Path) -> dict:
    """Message and seconds of each rank that lived on."""
    results, _ = run_ranks(fail_at_rank_one, (deed, transport, STAGES), 3, directory, START_S)
    assert all(seconds < END_S for _, seconds in results.values()), results
    return {rank: text for rank, (text, _) in results.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_cause_of_a_failure_is_named_on_every_rank(transport: str, tmp_path: Path) -> None:
    found = outcomes("raise", transport, tmp_path)
    assert found.keys() == {0, 1, 2}
    for text in found.values():
        assert text.startswith("RunFailed: ")
        assert "rank 1, stage 1, F0: shape mismatch in the user's code" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("deed", ["die", pytest.param("die between steps", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_within_seconds(
    transport: str, deed: str, tmp_path: Path
) -> None:
    found = outcomes(deed, transport, tmp_path)
    assert found.keys() == {0, 2}
    for text in found.values():
        assert text.startswith("RunFailed: ") and "rank 1 ended" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hanging_rank_is_named_when_the_time_limit_is_over(
    transport: str, tmp_path: Path
) -> None:
    results, codes = run_ranks(
        fail_at_rank_one, ("stall", transport, STAGES), 3, tmp_path, START_S, hanging=1
    )
    assert codes[1] is None, "the hanging rank hangs"
    texts = [text for text, _ in results.values()]
    assert len(texts) == 2
    assert any("waited 3 s for" in text and "stage 1 (rank 1)" in text for text in texts), texts


def test_a_process_that_is_alone_waits_without_a_store_to_look_into() -> None:
    world = World(0, 1, torch.device("cpu"), ("host",), ("cpu",), None, timeout_s=10.0)
    failures = Failures(world, lambda: None)
    failures.check()
    with failures.shared():
        failures.check()
    assert not failures.first
