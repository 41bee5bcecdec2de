"""Waits for a process that writes down how far it is."""

import subprocess
import time
from pathlib import Path


def finished(
    process: subprocess.Popen[bytes], place: Path, wait_s: float, first_wait_s: float = 0.0
) -> bool:
    """Wait for a process, and say whether it ended well.

    It is killed when the file ``place`` has not changed for ``wait_s`` seconds; the first change
    may take ``first_wait_s`` longer.
    """
    last, since_s = "", time.monotonic() + first_wait_s
    while process.poll() is None:
        time.sleep(0.1)
        now = place.read_text() if place.exists() else ""
        if now != last:
            last, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > wait_s:
            process.kill()
    return process.returncode == 0
