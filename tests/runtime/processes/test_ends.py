"""A process ends in peace."""

from pathlib import Path

from runtime.processes.rank_processes import run_ranks
from runtime.processes.workers_under_test import end_while_gloo_frees


def test_python_ends_after_gloo_has_freed_its_last_tensors(tmp_path: Path) -> None:
    _, codes = run_ranks(end_while_gloo_frees, (), 2, tmp_path, 120.0)
    assert codes == {0: 0, 1: 0}
