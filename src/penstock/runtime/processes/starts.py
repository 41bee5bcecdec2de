"""Tells a start of all ranks from earlier ones that left their values in the same store.

Torchrun's agent serves one store for as long as it lives. When it starts the ranks again, the store
still holds the addresses, positions and notes of those that have ended. Neither its port nor
``TORCHELASTIC_RESTART_COUNT`` tells the starts apart: the count stays when hosts come and go, and
differs between hosts. So the ranks agree on a new name, and put it in front of all keys.
"""

import atexit
import os
import secrets
import time
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from penstock.errors import RunFailed, Stalled

__all__ = ["ANSWERING", "may_hold_values_of_earlier_starts", "name_of_start", "pause_after"]

ANSWERING = "penstock answers ranks that start"
"""The name of rank 0's thread."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25
"""Between two looks at a store for a value that is not there yet."""

STOPPED_WITHIN_S = 2.0


def may_hold_values_of_earlier_starts() -> bool:
    """Whether the store belongs to an agent that may have started ranks before."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return served and "TORCHELASTIC_RUN_ID" in os.environ


def name_of_start(store: Any, rank: int, size: int, limit_s: float) -> str:
    """A name of this start, equal on all ranks and never used before; all ranks must call this.

    Rank 0 draws it. Any other rank draws a number, and takes the name that rank 0 writes as the
    answer to this number. So it takes none that an earlier rank 0 has written. ``store`` must have
    `clone`, because rank 0 answers from a thread while it goes on.

    Raises:
        Stalled: rank 0 has not answered within ``limit_s`` seconds.
        RunFailed: the store has ended, or somebody else has written into it.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        ended = Event()
        given = (store.clone(), own, size, ended)
        task = Thread(target=answer, args=given, name=ANSWERING, daemon=True)
        task.start()
        atexit.register(stop, task, ended)
        return own
    store.set(asked_by(rank), own)
    start_s = time.monotonic()
    while True:
        number, _, name = written(store, answer_for(rank)).partition(" ")
        if number == own:
            store.set(taken_by(rank), name)
            return name
        waited_s = time.monotonic() - start_s
        if waited_s > limit_s:
            raise Stalled(f"rank {rank} waited {limit_s:g} s for rank 0 to join the run")
        time.sleep(pause_after(waited_s))


def pause_after(waited_s: float) -> float:
    """How long to pause before the next look at a store, in seconds.

    A twentieth of what was waited: a value is found a little late, and a long wait costs little.

    >>> [pause_after(waited_s) for waited_s in (0.0, 1.0, 60.0)]
    [0.001, 0.05, 0.25]
    """
    return min(max(waited_s / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)


def stop(task: Thread, ended: Event) -> None:
    """End the thread: one that is in torch's code when Python ends aborts the process."""
    ended.set()
    task.join(STOPPED_WITHIN_S)


def answer(store: Any, name: str, size: int, ended: Event) -> None:
    """Give ``name`` to every rank that asks, until all have taken it or this process ends.

    The number found for a rank may be that of an earlier one. When the present one asks, there is
    another number, and it gets an answer as well.
    """
    answered: dict[int, str] = {}
    # The store ends with the agent.
    with suppress(RuntimeError, RunFailed):
        waiting, start_s = set(range(1, size)), time.monotonic()
        while waiting and not ended.wait(pause_after(time.monotonic() - start_s)):
            for rank in sorted(waiting):
                number = written(store, asked_by(rank))
                if number and number != answered.get(rank):
                    store.set(answer_for(rank), f"{number} {name}")
                    answered[rank] = number
                elif written(store, taken_by(rank)) == name:
                    waiting.remove(rank)


def written(store: Any, key: str) -> str:
    """What the store holds at a key; empty if nothing."""
    return store.get(key).decode() if store.check([key]) else ""


def asked_by(rank: int) -> str:
    """The key of the number that a rank has drawn."""
    return f"penstock/start/asked/{rank}"


def answer_for(rank: int) -> str:
    """The key of rank 0's answer: the number, and the name of the start."""
    return f"penstock/start/answer/{rank}"


def taken_by(rank: int) -> str:
    """The key of the name that a rank has taken."""
    return f"penstock/start/taken/{rank}"
