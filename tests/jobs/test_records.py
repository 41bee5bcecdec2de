"""Records on a disk that is full: an error that names it, and no traceback of another thread."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.jobs.run_directory import quiet_writers

WRITE = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from penstock.jobs.run_directory import Records
from penstock.jobs.run_directory import RunDirectory
records = Records(RunDirectory(Path(sys.argv[1])), 0, writes=True)
evaluation = SimpleNamespace(loss=1.0, metrics={f"metric-{n}": 1.0 for n in range(50)})
try:
    for step in range(10_000):
        records.evaluation(step, evaluation)
except OSError as error:
    time.sleep(0.5)
    print(error)
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
    assert "Traceback" not in done.stderr


def test_the_hook_of_threads_is_there_while_records_are_open_only() -> None:
    before = threading.excepthook
    with quiet_writers():
        assert threading.excepthook is not before
    assert threading.excepthook is before
    try:
        with quiet_writers():
            threading.excepthook = print
        assert threading.excepthook is print
    finally:
        threading.excepthook = before
