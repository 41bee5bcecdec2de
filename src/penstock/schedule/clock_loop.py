"""Plays orders as soon as possible: one loop, run as it is for few actions, compiled for many."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from collections.abc import Callable

__all__ = ["FORWARD", "GRADIENT", "RECOMPUTE", "ROWS", "play"]

FORWARD, GRADIENT, RECOMPUTE = range(3)
ROWS = 3
"""What others wait for: the end of F, of B or I, and of R, of every stage and micro-batch."""


def play_streams(
    stages, micro_batches, first, kind, stage, micro, seconds, transfer, ends, home, start
):
    """Give every action that can be played its start; how far each stream has come.

    Actions ``first[k]`` to ``first[k + 1]`` are stream ``k``: one after the other, each as soon as
    what it needs has ended. ``seconds[kind * stages + s]`` is what an action takes, ``transfer[s]``
    the way from stage ``s`` to the next and back. ``ends[row * cells + s * micro_batches + m]``
    must be infinite where an action will give the time, and less than any time elsewhere;
    ``home`` holds the stream of every F, then of every B or I, -1 where there is none.
    """
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
            cell = s * micro_batches + micro[i]
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
