"""A limit of the machine is named, with its value and the remedy."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.runtime.processes.launch import shortage_words

START = """
import resource
from penstock.errors import PenstockError
from penstock.runtime.processes.launch import launch_workers
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
try:
    launch_workers(print, ("no worker should print this",), workers=4)
except PenstockError as error:
    print(type(error).__name__, error)
"""


def test_too_few_file_handles_end_the_start_of_workers_with_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "RunFailed 4 workers cannot be started" in done.stdout, done.stdout + done.stderr
    assert "24 open files" in done.stdout
    assert "ulimit -n 1024" in done.stdout


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "a disk is full; delete files"),
        (errno.EAGAIN, "ulimit -u"),
        (errno.ENFILE, "open files"),
        (errno.EMFILE, str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
    ],
)
def test_every_shortage_has_its_remedy(number: int, told: str) -> None:
    assert told in shortage_words(OSError(number, os.strerror(number)))


def test_shared_memory_is_named_if_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    nearly_full = SimpleNamespace(free=4096, total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly_full)
    words = shortage_words(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert "/dev/shm has 4 KiB free of 65536 KiB" in words


def test_other_errors_are_no_shortage() -> None:
    assert shortage_words(FileNotFoundError(errno.ENOENT, "none")) == ""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/file")
    assert shortage_words(full) == ""
