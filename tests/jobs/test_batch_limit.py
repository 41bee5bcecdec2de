"""A wait for a batch that does not come ends within its limit, and the message names the data."""

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from penstock.errors import BadInput, Stalled
from penstock.jobs.batch_limit import without_hanging
from penstock.jobs.job import Job

LIMIT_S = 0.3


def endless(split: str, seed: int, start_step: int, batch_size: int) -> Iterator[Any]:
    """Two batches, and then none for ever."""
    yield from (1, 2)
    threading.Event().wait()


def hanging(split: str, seed: int, start_step: int, batch_size: int) -> Iterator[Any]:
    """No iterator for ever."""
    time.sleep(10_000)
    return iter(())


def finite(split: str, seed: int, start_step: int, batch_size: int) -> Iterator[Any]:
    return iter((1, 2, 3))


JOB = Job("small", build_model=nn.Identity, data=endless, batch_limit_s=LIMIT_S)


def test_a_batch_that_does_not_come_ends_the_wait() -> None:
    batches, found = JOB.batches("train", 4), []
    start_s = time.monotonic()
    with pytest.raises(Stalled) as error:
        found.extend(batches)
    assert 0.9 * LIMIT_S < time.monotonic() - start_s < 30
    message = str(error.value)
    for words in ("job 'small'", "split 'train'", "from step 5", "batch 3", "0.3 s", "raise the"):
        assert words in message
    assert "batch_limit_s" in message


def test_data_that_never_give_an_iterator_end_the_wait() -> None:
    with pytest.raises(Stalled, match="has not come within"):
        replace(JOB, data=hanging).example_batch()


def test_data_that_come_in_time_are_passed_on_and_leave_no_alarm() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    before_s, _ = signal.getitimer(signal.ITIMER_REAL)
    for limit_s in (60.0, 0.0):
        assert list(replace(JOB, data=finite, batch_limit_s=limit_s).batches("train")) == [1, 2, 3]
    assert signal.getsignal(signal.SIGALRM) is handler
    after_s, _ = signal.getitimer(signal.ITIMER_REAL)
    assert (after_s > 0) == (before_s > 0)


def test_an_alarm_of_before_rings_afterwards() -> None:
    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with without_hanging(30.0, "data"):
            time.sleep(0.05)
        end_s = time.monotonic() + 30
        while not rung and time.monotonic() < end_s:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert rung == [signal.SIGALRM]


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(BadInput, match="batch_limit_s is -1; it must be >= 0"):
        replace(JOB, batch_limit_s=-1)
