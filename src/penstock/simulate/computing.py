"""Compute speed of streams that share a device, and of devices that share a host's slots.

Compiled by numba, for `penstock.simulate.event_loop`.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from penstock.simulate.layout import (
    CLAIM,
    COMPUTING,
    FINISH,
    HOST_SLOTS,
    HOST_STREAM,
    HOST_STREAM_START,
    LEFT,
    LEFT_SINCE,
    NOW,
    PROGRESS,
    RUNNING,
    SHARED_HOST,
    SINCE,
    STREAMS_EACH,
    WORK,
)
from penstock.simulate.tournament import appoint

__all__ = ["COMPUTES", "TALKS", "TALKS_TOO", "occupy", "vacate"]

COMPUTES, TALKS, TALKS_TOO = 1, 3, 2
"""Why a stream is occupied: it computes, or its device communicates and cannot do both at once.

A transfer can start only if the lowest bit is 0. `TALKS_TOO` is added once for each transfer of a
device that can run several at once, and leaves that bit 0.
"""


def rate_of(w, host):
    """Seconds of work that each running stream of a host does in a second."""
    return min(1.0, w[w[HOST_SLOTS] + host] / max(1, w[w[COMPUTING] + host]))


def change_computing(w, x, host, change):
    """Advance the virtual time of a host to now, then change how many devices share it."""
    x[w[PROGRESS] + host] += rate_of(w, host) * (x[NOW] - x[w[SINCE] + host])
    x[w[SINCE] + host] = x[NOW]
    w[w[COMPUTING] + host] += change


def retime(w, x, host):
    """Move the ends of all work on a host to its present rate."""
    rate = rate_of(w, host)
    for k in range(w[w[HOST_STREAM_START] + host], w[w[HOST_STREAM_START] + host + 1]):
        stream = w[w[HOST_STREAM] + k]
        if w[w[RUNNING] + stream] == COMPUTES:
            left = max(0.0, x[w[FINISH] + stream] - x[w[PROGRESS] + host])
            appoint(w, x, stream, x[NOW] + left / rate)


def other_computes(w, stream):
    """Whether the other stream of a device with two streams computes."""
    return w[w[RUNNING] + (stream ^ 1)] == COMPUTES


def seconds_of(w, x, stream):
    """Seconds of a stream's whole piece at its present share of the device."""
    claim_s = x[w[CLAIM] + stream]
    if claim_s == 0 or not other_computes(w, stream):
        return x[w[WORK] + stream]
    # Forwards first, so that both engines add in the same order.
    total_s = x[w[CLAIM] + (stream & ~1)] + x[w[CLAIM] + (stream | 1)]
    return x[w[WORK] + stream] / claim_s * total_s


def begin_or_end(w, x, stream, computes):
    """Begin or end a piece on one of two streams, and retime the piece on the other."""
    host, other = w[w[SHARED_HOST] + stream], stream ^ 1
    both, change = other_computes(w, stream), 1 if computes else -1
    if host >= 0:
        change_computing(w, x, host, 0 if both else change)
    clock = x[w[PROGRESS] + host] if host >= 0 else x[NOW]
    whole_s = seconds_of(w, x, other) if both else 0.0
    w[w[RUNNING] + stream] = COMPUTES if computes else 0
    if whole_s > 0:
        x[w[LEFT] + other] -= (clock - x[w[LEFT_SINCE] + other]) / whole_s
        x[w[LEFT_SINCE] + other] = clock
        x[w[FINISH] + other] = clock + x[w[LEFT] + other] * seconds_of(w, x, other)
    if computes:
        x[w[LEFT] + stream], x[w[LEFT_SINCE] + stream] = 1.0, clock
        x[w[FINISH] + stream] = clock + seconds_of(w, x, stream)
    if host >= 0:
        retime(w, x, host)
        return
    if computes:
        appoint(w, x, stream, x[w[FINISH] + stream])
    if both:
        appoint(w, x, other, x[w[FINISH] + other])


def occupy(w, x, stream, seconds, claim_s):
    """Begin work on a stream; streams that share its device or its host's slots slow down."""
    if w[STREAMS_EACH] == 2:
        x[w[WORK] + stream], x[w[CLAIM] + stream] = seconds, claim_s
        begin_or_end(w, x, stream, True)
        return
    host = w[w[SHARED_HOST] + stream]
    w[w[RUNNING] + stream] = COMPUTES
    if host < 0:
        appoint(w, x, stream, x[NOW] + seconds)
    else:
        change_computing(w, x, host, 1)
        x[w[FINISH] + stream] = x[w[PROGRESS] + host] + seconds
        retime(w, x, host)


def vacate(w, x, stream):
    """End work on a stream; streams that share its device or its host's slots speed up."""
    if w[STREAMS_EACH] == 2:
        begin_or_end(w, x, stream, False)
        return
    host = w[w[SHARED_HOST] + stream]
    w[w[RUNNING] + stream] = 0
    if host >= 0:
        change_computing(w, x, host, -1)
        retime(w, x, host)
