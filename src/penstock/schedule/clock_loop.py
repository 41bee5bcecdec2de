"""Plays orders as early as possible: plain Python for few actions, compiled for many."""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["FORWARD", "GRADIENT", "RECOMPUTE", "ROWS", "Streams", "play"]

FORWARD, GRADIENT, RECOMPUTE = range(3)
ROWS = 3
"""Rows of ``ends``: the end of F, of B or I, and of R, for every stage and micro-batch."""


class Streams(NamedTuple):
    """Orders to play, as lists or arrays.

    Stream ``k`` is the actions ``first[k]`` to ``first[k + 1] - 1`` of ``kind``, ``stage`` and
    ``micro_batch``. ``home`` holds the stream of every F, then of every B or I; -1 stands for none.
    An action takes ``seconds[kind * stages + s]``, and a transfer from stage ``s`` to the next or
    back ``transfer[s]``.
    """

    stages: int
    micro_batches: int
    first: Any
    kind: Any
    stage: Any
    micro_batch: Any
    home: Any
    seconds: Any
    transfer: Any


def play_streams(orders, ends, start):
    """Write the start of every action that can be played; return how far each stream got.

    The actions of a stream run one after the other, each as soon as what it needs has ended. On
    entry ``ends[row * cells + s * micro_batches + m]`` is infinite where an action of the schedule
    will set it, and minus infinity elsewhere.
    """
    stages, micro_batches, first = orders.stages, orders.micro_batches, orders.first
    kind, stage, home = orders.kind, orders.stage, orders.home
    seconds, transfer = orders.seconds, orders.transfer
    cells = stages * micro_batches
    streams = len(first) - 1
    reached = [first[k] for k in range(streams)]
    free = [0.0 for _ in range(streams)]
    todo = [k for k in range(streams)]
    listed = [True for _ in range(streams)]
    while len(todo) > 0:
        k = todo.pop()
        listed[k] = False
        while reached[k] < first[k + 1]:
            i = reached[k]
            code, s = kind[i], stage[i]
            cell = s * micro_batches + orders.micro_batch[i]
            ready = free[k]
            if code == 0:
                if s > 0:
                    ready = max(ready, ends[cell - micro_batches] + transfer[s - 1])
            elif code == 3:
                ready = max(ready, ends[cells + cell])
            else:
                ready = max(ready, ends[cell])
                if code != 4:
                    ready = max(ready, ends[2 * cells + cell])
                    if s + 1 < stages:
                        ready = max(ready, ends[cells + cell + micro_batches] + transfer[s])
            if ready > 1e300:
                break
            start[i] = ready
            free[k] = ready + seconds[code * stages + s]
            reached[k] = i + 1
            wake = -1
            if code == 0:
                ends[cell] = free[k]
                wake = home[cells + cell]
                if wake >= 0 and not listed[wake]:
                    todo.append(wake)
                    listed[wake] = True
                wake = home[cell + micro_batches] if s + 1 < stages else -1
            elif code == 1 or code == 2:
                ends[cells + cell] = free[k]
                wake = home[cells + cell - micro_batches] if s > 0 else -1
            elif code == 4:
                ends[2 * cells + cell] = free[k]
            if wake >= 0 and not listed[wake]:
                todo.append(wake)
                listed[wake] = True
    return reached


play: Callable[..., list[int]] = play_streams
"""`play_streams`, with a type."""
