"""Records of a run: TensorBoard reads them, and a disk that is full is named in one error."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.report.record import read_rows
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.user_metrics import Evaluation
from penstock.train.run_directory import Records, RunDirectory

WRITE = """
import resource, sys, time
from pathlib import Path
from types import SimpleNamespace
from penstock.train.run_directory import Records
from penstock.train.run_directory import RunDirectory
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (int(sys.argv[2]),))
evaluation = SimpleNamespace(loss=1.0, metrics={f"metric-{n}": 1.0 for n in range(50)})
records = Records(RunDirectory(Path(sys.argv[1])), 0, writes=True)
try:
    for step in range(10_000):
        records.evaluation(step, evaluation)
except OSError as error:
    time.sleep(0.5)
    print(step, error)
records.close()
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a disk of its own")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount a disk")
def test_a_full_disk_is_named_and_no_traceback_printed(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=256k tmpfs {tmp_path}"
    command = f"{mount} && exec {sys.executable} -c '{WRITE}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False
    )
    assert f"No space left on device: '{tmp_path}" in done.stdout, done.stderr
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("most", [500, 20_000])
def test_the_record_that_finds_no_place_is_the_one_that_fails(tmp_path: Path, most: int) -> None:
    """A thread that wrote for TensorBoard would fail later, and print why by itself."""
    done = subprocess.run(
        [sys.executable, "-c", WRITE, tmp_path, str(most)],
        capture_output=True,
        text=True,
        check=False,
    )
    step, _, error = done.stdout.partition(" ")
    assert f"File too large: '{tmp_path}" in error, done.stderr
    assert (done.stderr, done.returncode) == ("", 0)
    written = list(read_rows(tmp_path / "metrics.jsonl", damaged=False))
    # The line is written before the file of TensorBoard.
    assert len(written) == int(step) + ("metrics.jsonl" not in error)


def test_tensorboard_reads_the_records_and_forgets_steps_that_are_taken_again(
    tmp_path: Path,
) -> None:
    records = Records(RunDirectory(tmp_path), 0, writes=True)
    metrics = StepMetrics(1, 4.0, 1.0, 0.1, 8, 2.0, 0.25, metrics={"accuracy": 0.5})
    for step in (1, 2, 3):
        records.step(replace(metrics, step=step, loss=4.0 / step))
    records.evaluation(3, Evaluation(loss=0.75, samples=8, weight=1.0))
    records.go_back(1)
    records.step(replace(metrics, step=2, loss=8.0))
    records.drift(2, {"stage_0": 1.5})
    records.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    curves = {
        name: [(point.step, point.value) for point in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }
    assert curves["loss"] == [(1, 4.0), (2, 8.0)]
    assert curves["accuracy"] == [(1, 0.5), (2, 0.5)]
    assert curves["samples_per_s"] == [(1, 4.0), (2, 4.0)]
    assert curves["drift/stage_0"] == [(2, 1.5)]
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 4.0), (2, 8.0)]
