import json
from pathlib import Path

import pytest

from penstock.errors import BadInput
from penstock.report.record import NEEDED, read_run


def refusal(directory: Path) -> str:
    with pytest.raises(BadInput) as caught:
        read_run(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_run_is_read_whole(run_directory: Path) -> None:
    record = read_run(run_directory)
    assert len(record.steps) == 40 and len(record.evaluations) == 4
    assert record.error < 0
    assert sorted(record.measured_peaks) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_file_is_named(run_directory: Path, name: str) -> None:
    (run_directory / name).unlink()
    message = refusal(run_directory)
    assert name in message and "penstock train" in message


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert "'" + str(tmp_path / "none") + "' does not exist" in refusal(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step"', "line 2"),
        ("metrics.jsonl", '{"step": 1}\n', "loss"),
        ("metrics.jsonl", "[1, 2]\n", "line 1"),
        ("summary.json", "{", "summary.json"),
        ("summary.json", '{"job": "x"}', "workers"),
        ("predicted.json", "{}", "predicted.json"),
        ("plan.json", "[]", "plan.json"),
    ],
)
def test_a_malformed_file_is_named_with_the_place(
    run_directory: Path, name: str, content: str, told: str
) -> None:
    (run_directory / name).write_text(content)
    assert told in refusal(run_directory)


def test_files_of_different_runs_are_refused(run_directory: Path) -> None:
    path = run_directory / "plan.json"
    plan = json.loads(path.read_text())
    plan["stages"][-1]["layers"] = [7, 9]
    path.write_text(json.dumps(plan))
    assert "9 layers" in refusal(run_directory)


def test_a_measured_time_of_zero_is_refused(run_directory: Path) -> None:
    path = run_directory / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured_s": 0.0}))
    assert "measured_s is 0.0" in refusal(run_directory)
