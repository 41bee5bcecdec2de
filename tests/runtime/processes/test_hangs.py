"""A rank that stops, hangs or leaves ends the run, and the message says which and where."""

import re
from pathlib import Path

import pytest
from runtime.processes.hang_cases import RANKS, StopsOneReader, hang

from penstock.errors import RunFailed
from penstock.runtime.processes.launch import launch_workers

SHORT_S, LONG_S = 6.0, 120.0
"""A limit that a stopped rank exceeds, and one that ranks must not wait for."""

STOPPED = r"rank [02] waited .* rank 1 has not answered for \d+ s: its process is stopped"
LEFT = r"if (its data|the data of rank 1) end early, give every rank the same batches"


def message(directory: Path, where: str, deed: str, limit_s: float, transport: str) -> str:
    arguments = (where, deed, directory / "checkpoints", limit_s, transport)
    logs = directory / "logs"
    with pytest.raises(RunFailed) as found:
        launch_workers(hang, arguments, workers=RANKS, threads=1, log_directory=logs)
    return str(found.value)


@pytest.mark.parametrize(
    ("where", "transport"),
    [
        ("checkpoint", "auto"),
        pytest.param("before", "auto", marks=pytest.mark.slow),
        pytest.param("step", "auto", marks=pytest.mark.slow),
        pytest.param("step", "process-groups", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_rank_is_named_wherever_it_was(
    where: str, transport: str, tmp_path: Path
) -> None:
    found = message(tmp_path, where, "stop", SHORT_S, transport)
    assert re.search(STOPPED, found), found


def test_a_rank_that_is_stopped_before_it_joins_is_named(tmp_path: Path) -> None:
    stops = StopsOneReader(tmp_path / "stopped")
    arguments = ("", "", tmp_path, SHORT_S, "auto", stops)
    with pytest.raises(RunFailed, match=r"rank \d waited .*; rank \d has not joined the run"):
        launch_workers(hang, arguments, workers=RANKS, threads=1, log_directory=tmp_path / "logs")


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("leave", "rank 1 has closed its pipeline while rank"),
        ("save", "rank 1 saves a checkpoint after batch 1, while rank"),
    ],
)
def test_a_rank_whose_data_end_early_is_named_long_before_the_time_limit(
    deed: str, says: str, tmp_path: Path
) -> None:
    found = message(tmp_path, "data", deed, LONG_S, "auto")
    assert says in found
    assert re.search(LEFT, found), found
    assert "waited 120 s" not in found


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_forward_is_named_with_its_action(tmp_path: Path) -> None:
    found = message(tmp_path, "step", "sleep", SHORT_S, "auto")
    assert "rank 1 does not wait: it takes a step after batch 1, F0 of stage 1" in found
