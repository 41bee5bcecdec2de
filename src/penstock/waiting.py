"""Prints a line about what is waited for, if it takes longer than a few seconds."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Timer

__all__ = ["PATIENCE_S", "notice_if_long"]

PATIENCE_S = 3.0
"""Work that takes longer than this prints what it is."""


@contextmanager
def notice_if_long(note: Callable[[str], None], words: str) -> Generator[None]:
    """Let ``note`` print ``words``, once, if the block takes longer than `PATIENCE_S`.

    Ctrl-C ends the block, also where a package that is imported in it catches everything.
    """
    timer = Timer(PATIENCE_S, note, (words,))
    timer.daemon = True
    timer.start()
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    handled = is_usual and threading.current_thread() is threading.main_thread()
    if handled:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        timer.cancel()
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
