"""Ctrl-C while a command imports what it needs."""

import signal
from collections.abc import Iterator

import pytest

from penstock.commands.job_commands import loading


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """Shells start what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_counts_though_an_import_takes_it_for_its_own_failure() -> None:
    before = signal.getsignal(signal.SIGINT)
    gone_on = False
    with pytest.raises(KeyboardInterrupt), loading(lambda words: None):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:  # as modules do around imports that may fail
            gone_on = True
    assert gone_on
    assert signal.getsignal(signal.SIGINT) is before


def test_another_handler_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with loading(lambda words: None):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
