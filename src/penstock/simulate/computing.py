"""Compute speed of streams that share a device, and of devices that share a host's slots.

Compiled by numba, for `penstock.simulate.event_loop`.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from penstock.simulate.tournament import appoint

__all__ = ["COMPUTES", "TALKS", "TALKS_TOO", "occupy", "vacate"]

COMPUTES, TALKS, TALKS_TOO = 1, 3, 2
"""Why a stream is occupied: by its own work, or because its device cannot do both at once.

A transfer cannot start while the lowest bit is set: `TALKS_TOO`, added once for each, lets others.
"""


def rate_of(state, host):
    """Seconds of work that each running stream of a host does in a second."""
    return min(1.0, state.host_slots[host] / max(1, state.computing[host]))


def change_computing(state, host, change):
    """Advance the virtual time of a host to now, then change how many devices share it."""
    state.progress[host] += rate_of(state, host) * (state.now_s - state.since[host])
    state.since[host] = state.now_s
    state.computing[host] += change


def retime(state, host):
    """Move the ends of all work on a host to its present rate."""
    rate = rate_of(state, host)
    for k in range(state.host_stream_start[host], state.host_stream_start[host + 1]):
        stream = state.host_stream[k]
        if state.running[stream] == COMPUTES:
            left = max(0.0, state.finish[stream] - state.progress[host])
            appoint(state, stream, state.now_s + left / rate)


def other_computes(state, stream):
    """Whether the other stream of a device with two streams computes."""
    return state.running[(stream ^ 1)] == COMPUTES


def seconds_of(state, stream):
    """Seconds of a stream's whole piece at its present share of the device."""
    claim_s = state.claim[stream]
    if claim_s == 0 or not other_computes(state, stream):
        return state.work[stream]
    # Forwards first, so that both engines add in the same order.
    total_s = state.claim[(stream & ~1)] + state.claim[(stream | 1)]
    return state.work[stream] / claim_s * total_s


def begin_or_end(state, stream, computes):
    """Begin or end a piece on one of two streams, and retime the piece on the other."""
    host, other = state.shared_host[stream], stream ^ 1
    both, change = other_computes(state, stream), 1 if computes else -1
    if host >= 0:
        change_computing(state, host, 0 if both else change)
    clock = state.progress[host] if host >= 0 else state.now_s
    whole_s = seconds_of(state, other) if both else 0.0
    state.running[stream] = COMPUTES if computes else 0
    if whole_s > 0:
        state.left[other] -= (clock - state.left_since[other]) / whole_s
        state.left_since[other] = clock
        state.finish[other] = clock + state.left[other] * seconds_of(state, other)
    if computes:
        state.left[stream], state.left_since[stream] = 1.0, clock
        state.finish[stream] = clock + seconds_of(state, stream)
    if host >= 0:
        retime(state, host)
        return
    if computes:
        appoint(state, stream, state.finish[stream])
    if both:
        appoint(state, other, state.finish[other])


def occupy(state, stream, seconds, claim_s):
    """Begin work on a stream; streams that share its device or its host's slots slow down."""
    if state.streams_each == 2:
        state.work[stream], state.claim[stream] = seconds, claim_s
        begin_or_end(state, stream, True)
        return
    host = state.shared_host[stream]
    state.running[stream] = COMPUTES
    if host < 0:
        appoint(state, stream, state.now_s + seconds)
    else:
        change_computing(state, host, 1)
        state.finish[stream] = state.progress[host] + seconds
        retime(state, host)


def vacate(state, stream):
    """End work on a stream; streams that share its device or its host's slots speed up."""
    if state.streams_each == 2:
        begin_or_end(state, stream, False)
        return
    host = state.shared_host[stream]
    state.running[stream] = 0
    if host >= 0:
        change_computing(state, host, -1)
        retime(state, host)
