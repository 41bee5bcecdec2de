"""A launcher notices that a signal has stopped a worker for which no other one waits."""

from pathlib import Path

import pytest
from runtime.processes.workers_under_test import stop_once

from penstock.errors import Stalled
from penstock.runtime.processes import launch
from penstock.runtime.processes.launch import launch_workers


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOPPED_LIMIT_S", 4.0)


@pytest.mark.usefixtures("short_limit")
def test_a_stopped_worker_is_named_and_ends(tmp_path: Path) -> None:
    with pytest.raises(
        Stalled, match=r"worker 1 \(process \d+\) has been stopped for 4 s"
    ) as found:
        launch_workers(stop_once, (False,), workers=2, log_directory=tmp_path)
    process = str(found.value).partition("process ")[2].partition(")")[0]
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.usefixtures("short_limit")
def test_a_worker_that_continues_in_time_is_left_alone(tmp_path: Path) -> None:
    assert launch_workers(stop_once, (True,), workers=2, log_directory=tmp_path) == (0, 1)
