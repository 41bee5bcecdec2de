"""Lines on standard error, and one about what is waited for if it takes a few seconds."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Timer

PATIENCE_S = 3.0
"""Work that takes longer than this prints what it is."""


def say(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


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
