"""Run directories are never overwritten, and a resumed run drops what came after its checkpoint."""

import json
import tracemalloc
from pathlib import Path

import pytest

from penstock.errors import BadInput
from penstock.report.record import read_rows
from penstock.runtime.checkpoints.checkpoint import state_text
from penstock.train.rank_program import has_checkpoint
from penstock.train.run_directory import drop_rows_after, latest_run, new_run


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_run_is_named_after_job_and_time() -> None:
    run = new_run("digits", None)
    assert run.path.is_dir()
    assert run.path.parent == Path("runs")
    assert run.path.name.startswith("digits-2")


def test_a_place_that_cannot_be_a_directory_is_refused() -> None:
    Path("file").touch()
    with pytest.raises(BadInput, match=r"'file' cannot be made .* name another with --out"):
        new_run("digits", "file")


def test_the_newest_run_of_the_job_is_resumed_and_no_other() -> None:
    for name in ("digits-20260101-000000", "digits-20260102-000000", "digits-big-20270101-000000"):
        (Path("runs") / name).mkdir(parents=True)
        (Path("runs") / name / "plan.json").touch()
    (Path("runs") / "digits-20260103-000000").mkdir()  # ended before it had a plan
    assert latest_run("digits", None).path.name == "digits-20260102-000000"


def test_rows_after_the_checkpoint_and_half_rows_are_dropped() -> None:
    path = Path("metrics.jsonl")
    rows = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    lines = [*map(json.dumps, rows), '{"step": 2, "evaluation_loss": 0.5}', '{"step": 1, "lo']
    path.write_text("\n".join(lines))
    drop_rows_after(path, 2)
    assert list(read_rows(path)) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 1.0},
        {"step": 2, "evaluation_loss": 0.5},
    ]


def test_a_long_record_is_resumed_with_little_memory() -> None:
    path = Path("metrics.jsonl")
    row = json.dumps({"step": 1, "loss": 1.0, "note": "x" * 1000})
    path.write_text(f"{row}\n" * 10_000)  # 10 MB
    tracemalloc.start()
    drop_rows_after(path, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 10_000_000
    assert peak < 1_000_000


def test_a_directory_has_one_run_at_a_time() -> None:
    run = new_run("digits", "shared")
    other = new_run("digits", "shared")
    with run.held(), pytest.raises(BadInput, match="'shared' is in use"), other.held():
        pass
    with run.held():
        pass


def test_a_run_without_a_checkpoint_is_resumed_from_its_first_step() -> None:
    said: list[str] = []
    run = new_run("digits", "killed")
    assert not has_checkpoint(run, said.append)
    assert said == ["'killed' has no checkpoint yet; training starts at the first step"]
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    assert not has_checkpoint(run, said.append)  # half of one
    (run.checkpoints / "step-00000004" / "state.json").write_text(state_text(4, {}, {}))
    assert has_checkpoint(run, said.append)
