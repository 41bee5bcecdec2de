"""Lines for the user, by `logging`, and one about what is waited for if it takes a few seconds.

Each package has a logger, such as ``penstock.runtime``; ``logging.getLogger("penstock").setLevel``
silences them all. Where the program configures no logging, lines go to standard error as they are.
"""

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Timer

PATIENCE_S = 3.0
"""Seconds after which work prints what it is."""


class BareLines(logging.Handler):
    """A handler that prints lines as they are, unless the program has handlers of its own."""

    always = False

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line on standard error."""
        if self.always or not (logging.getLogger().handlers or LINES.handlers != [self]):
            print(record.getMessage(), file=sys.stderr, flush=True)


LINES, BARE = logging.getLogger("penstock"), BareLines()
LINES.addHandler(BARE)
LINES.setLevel(LINES.level or logging.INFO)


def print_bare_lines() -> None:
    """Print all lines as they are, whatever logging the code of a job configures."""
    BARE.always, LINES.propagate = True, False


def say(text: str) -> None:
    """Give a line to the logger of the package that calls this."""
    package = sys._getframe(1).f_globals["__name__"].split(".")[1:2]
    logging.getLogger(".".join((LINES.name, *package))).info(text)


@contextmanager
def notice_if_long(note: Callable[[str], None], words: str) -> Generator[None]:
    """Let ``note`` print ``words``, once, if the block takes longer than `PATIENCE_S`."""
    timer = Timer(PATIENCE_S, note, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
