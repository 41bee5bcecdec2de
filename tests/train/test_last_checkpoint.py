"""A run that fails says how to go on, also before its first checkpoint."""

from pathlib import Path

import pytest

from penstock.errors import WorkerLost
from penstock.train.rank_program import last_checkpoint_said
from penstock.train.run_directory import RunDirectory


def test_a_run_without_a_checkpoint_can_be_resumed_too(tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory(tmp_path)
    with pytest.raises(WorkerLost), last_checkpoint_said(directory, said.append, goes_on=False):
        raise WorkerLost("killed")
    remedy = f"--resume --out {tmp_path} starts at the first step again"
    assert said == [f"there is no checkpoint yet; {remedy}"]
    with pytest.raises(WorkerLost), last_checkpoint_said(directory, said.append, goes_on=True):
        raise WorkerLost("killed")
    assert len(said) == 1
