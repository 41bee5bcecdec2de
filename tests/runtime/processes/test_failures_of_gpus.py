"""With a GPU for each rank, a failing rank says why, aborts its groups, and ends the others."""

import pytest
from runtime.processes.gpu_failure_cases import steps_until

from penstock.runtime.processes.launch import launch_workers


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("module", "rank 0, stage 0, F0: shape mismatch in the user's code"),
        ("message", "rank 0, F0 from stage 0 (rank 0): CUDA out of memory. Tried"),
    ],
)
def test_all_ranks_say_what_happened_on_one(failure: str, told: str) -> None:
    found = launch_workers(steps_until, (failure,), workers=2)
    for rank, (backend, first, (failed, after), aborts) in enumerate(found):
        assert backend == "nccl"
        assert float(first) > 0
        assert told in failed and ("rank 1 stopped: " in failed) == (rank == 1), failed
        assert "has failed before" in after
        assert aborts == 1, "that of its messages"
