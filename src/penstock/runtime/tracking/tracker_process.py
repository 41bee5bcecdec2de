"""The process of one tracker: reads rows from its standard input, and shows them.

The first line is the tracker's name and the `TrackedRun`, every other one a row with its step. The
library runs in the main thread of a process of its own. There it cannot hold a rank, take its
memory, or end it.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue

from penstock.document import write_text
from penstock.runtime.tracking.registry import TRACKERS
from penstock.runtime.tracking.tracked_run import TrackedRun

__all__ = ["END", "LINGER_S", "show_rows"]

END = "end\n"
"""The line after the last row."""

LINGER_S = 60.0
"""How long this process may live once no more rows can come: a library may hang."""


def show_rows(lines: Iterable[str], tracker_name: str, run: TrackedRun) -> None:
    """Show all rows of ``lines``, as they come, up to `END` or the end of the input.

    The run's id is kept beside the tracker's files. If it is there already, that run goes on.
    """
    rows = SimpleQueue[str]()
    threading.Thread(target=read_all, args=(lines, rows), daemon=True).start()
    kept = Path(run.directory, f"{tracker_name}.id")
    before = kept.read_text("utf-8").strip() if kept.exists() else ""
    tracker = TRACKERS[tracker_name](run, before)
    write_text(kept, f"{tracker.run_id}\n")
    while row := rows.get():
        values = json.loads(row)
        tracker.log(values, values.pop("step"))
    tracker.finish()


def read_all(lines: Iterable[str], rows: "SimpleQueue[str]") -> None:
    """Take lines at once, however slow the tracker is; at their end this process has to end."""
    for line in lines:
        if line == END:
            break
        rows.put(line)
    rows.put("")
    time.sleep(LINGER_S)
    os._exit(1)


def main() -> None:
    """Run the process; the last line that a failure prints is its cause."""
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # a library that asks for input gets none of the rows
    try:
        first = json.loads(lines.readline())
        show_rows(lines, first.pop("tracker"), TrackedRun(**first))
    except BaseException as failure:
        traceback.print_exc()
        cause = str(failure).strip().partition("\n")[0]
        print(f"{type(failure).__name__}: {cause}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
