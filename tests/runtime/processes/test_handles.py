"""Nothing is left behind: no operation under way after a step, no file or thread after closing."""

import pytest
from runtime.processes.handles_cases import CASES, after_steps_and_after_closing, handle_under_way

from penstock.runtime.processes.launch import launch_workers

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_handles_end_with_their_step_and_files_with_their_pipeline(transport: str) -> None:
    for rank, found in enumerate(
        launch_workers(after_steps_and_after_closing, (transport,), workers=3, threads=1)
    ):
        assert len(found) == len(CASES)
        for case, seen in found.items():
            assert seen["handles"] and not any(seen["handles"]), (
                f"rank {rank}, {case}: handles {seen['handles']}"
            )
            # The first pipeline may load and open what stays for the process; a connection of the
            # exchange at its end may close a moment later.
            first, *others = seen["closed"]
            for after in others:
                for what in ("files", "threads", "shared"):
                    assert after[what] <= first[what], f"rank {rank}: {seen}"
                assert after["shared"] == 0
            assert all(seen["working"][what] > first[what] for what in ("files", "threads"))


def test_a_handle_that_is_kept_would_be_found() -> None:
    assert launch_workers(handle_under_way, workers=2, threads=1) == ((1, 0), (1, 0))
