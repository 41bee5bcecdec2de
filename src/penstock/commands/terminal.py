"""Output of a command: results on standard output; notes and one-line errors on stderr."""

import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typer import TyperException

from penstock.commands.options import AsJson, Quiet
from penstock.errors import (
    INTERRUPTED,
    BadInput,
    PenstockError,
    RunFailed,
    SaidByAnotherRank,
    missing_for_training,
    shortened,
)
from penstock.waiting import say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.timeline.timeline import Timeline

LONGEST_LINE = 600
"""The most characters of an error's line, unless the error has more to say."""


WIDEST = 10_000
"""The most characters of a table's line where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """The form of output: as one JSON object or for people; with or without notes."""

    as_json: AsJson = False
    quiet: Quiet = False

    @staticmethod
    def check_places(*places: str) -> None:
        """Raise `BadInput` for a place that cannot be written to; empty ones are none."""
        from penstock.files import check_place

        for place in filter(None, places):
            check_place(place)

    def note(self, text: str) -> None:
        """Print a note on standard error, unless it is empty."""
        if text and not self.quiet:
            say(text)

    def show(self, values: Mapping[str, object], *parts: "RenderableType") -> None:
        """Print the result: ``values`` as JSON, or ``parts`` for people."""
        if self.as_json:
            print(json.dumps(values), flush=True)
            return
        from rich.console import Console
        from rich.table import Table

        from penstock.report.tables import NarrowTable

        # Elsewhere than on a terminal tables are as wide as they need to be, and no line is broken.
        shown = sys.stdout.isatty()
        console = Console(width=None if shown else WIDEST, highlight=False, markup=False)
        for part in parts:
            part = NarrowTable(part) if isinstance(part, Table) else part
            console.print(part, soft_wrap=isinstance(part, str) and not shown)

    def show_text(self, values: Mapping[str, object], text: str) -> None:
        """Print a text that a program will read exactly as it is, or ``values`` as JSON."""
        sys.stdout.write(f"{json.dumps(values)}\n" if self.as_json else text)
        sys.stdout.flush()

    def chart(self, timeline: "Timeline") -> "RenderableType":
        """A timeline as a chart of characters, as wide as the terminal, in colour on a terminal.

        The environment variables ``NO_COLOR`` and ``COLUMNS`` are respected.
        """
        from rich.text import Text

        from penstock.report.gantt_text import gantt

        in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        drawn = gantt(timeline, shutil.get_terminal_size((100, 24)).columns, in_colour)
        return Text.from_ansi(drawn, no_wrap=True)

    def save(self, values: Mapping[str, object], path: str) -> None:
        """Write ``values`` as JSON to ``path``, unless that is empty."""
        if path:
            from penstock.files import write_text

            write_text(path, json.dumps(values, indent=2) + "\n")
            self.note(f"wrote {path}")

    def save_csv(self, rows: Iterable[Mapping[str, object]], path: str) -> None:
        """Write ``rows`` as CSV to ``path``, unless that is empty."""
        if path:
            from penstock.files import csv_text, write_text

            write_text(path, csv_text(list(rows)))
            self.note(f"wrote {path}")


def print_error(error: BaseException) -> int:
    """Print an error in one line; returns the exit code.

    The traceback of an error that is not Penstock's own is saved to a file.
    """
    match error:
        case SaidByAnotherRank():
            return error.code
        case PenstockError():
            message, code = one_line(error), error.exit_code
        case TyperException():
            command = getattr(getattr(error, "ctx", None), "command_path", "penstock")
            problem = " ".join(error.format_message().split()).rstrip(".")
            message, code = f"{problem}; see '{command} --help'", BadInput.exit_code
        case KeyboardInterrupt():
            message, code = "interrupted", INTERRUPTED
        case ModuleNotFoundError() if missing := missing_for_training(error):
            message, code = missing, BadInput.exit_code
        case _:
            handle, place = tempfile.mkstemp(prefix="penstock-error-", suffix=".txt")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(traceback.format_exception(error))
            problem = shortened(f"{type(error).__name__}: {one_line(error)}", LONGEST_LINE // 2)
            message = f"{problem}; the traceback is in {place}"
            code = RunFailed.exit_code
    prefix = "penstock: " if code == INTERRUPTED else "penstock: error: "
    longest = getattr(error, "longest", LONGEST_LINE)
    text = shortened(printable(message), longest - len(prefix))
    print(f"{prefix}{text}", file=sys.stderr, flush=True)
    return code


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """A text with escapes for what would move the cursor, ring, or be seen by nobody.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


NEW_OBJECTS = 400_000
"""Garbage collection starts when this many more objects have been created than freed."""


def collect_garbage_rarely() -> None:
    """Run Python's garbage collector less often, and not at exit; saves about 0.3 s.

    Loading libraries creates a few hundred thousand objects that all stay, so collections find
    nothing.
    """
    gc.set_threshold(NEW_OBJECTS, 50, 100)
    atexit.register(gc.freeze)
