"""The rules of `penstock.simulate.plain` on flat arrays, compiled by numba.

Equal to the plain engine to rounding (a property test holds them together). The sources of events,
devices and then lanes, are the leaves of a tournament: each inner node of a binary tree knows the
earlier of its two, so the next event is at the root, and a new time climbs up. All functions
stand in one file, because numba looks at this file alone when it asks whether what it kept on
disk is out of date; after a change of `penstock.simulate.layout`, delete `__pycache__`. Speed:
see benchmarks/simulator.
"""

# numba has no types: its decorator makes every compiled function unknown to a strict checker.
# pyright: basic

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from penstock.simulate.borrowed import borrowed
from penstock.simulate.layout import (
    ACTING,
    ACTION_SPAN,
    BUCKET_SECONDS,
    BUCKETS_LEFT,
    BUSY,
    COMPLETION,
    COMPLETION_START,
    COMPUTING,
    CURRENT,
    DEVICES,
    FINISH,
    FIRST_SEGMENT,
    GROUP_OF_BUCKET,
    HEAD,
    HOST_DEVICE,
    HOST_DEVICE_START,
    HOST_SLOTS,
    INPUT_ROW,
    INPUTS,
    ITEM_SPAN,
    ITEM_START,
    LAST_BACKWARD,
    LEAVES,
    MEMBER,
    MEMBER_START,
    MEMBERS_LEFT,
    MESSAGE_SECONDS,
    MESSAGES,
    MICRO_BATCHES,
    NEXT,
    NOW,
    ORDER_END,
    ORDER_KIND,
    ORDER_MICRO,
    PIECES,
    POSITION,
    PROGRESS,
    QUEUE,
    QUEUE_SEQUENCE,
    RESOURCE,
    RESOURCE_START,
    RUNNING,
    SECONDS,
    SEGMENT,
    SEGMENT_COUNT,
    SEGMENT_START,
    SENDS_START,
    SHARED_HOST,
    SINCE,
    SPAN_OFFSET,
    SPANS,
    STEP,
    STEP_SPAN,
    TAIL,
    USER,
    USER_START,
    WAITED,
    WAITING,
)

__all__ = ["run"]

compiled = numba.njit

LAST = np.int64(1) << 60
"""Added to the rank of reductions, which let messages go first."""


@compiled
def appoint(w, x, source, time_s):
    """Let ``source`` act at ``time_s`` instead of any earlier appointment."""
    first = w[NEXT]
    node = w[LEAVES] + source
    x[first + node] = time_s
    if source == w[ACTING]:
        return
    while node > 1:
        node >>= 1
        earlier = min(x[first + 2 * node], x[first + 2 * node + 1])
        if x[first + node] == earlier:
            break
        x[first + node] = earlier


@compiled
def finish_acting(w, x):
    """Bring the nodes above the source that has acted up to date: till now they held its time.

    Whoever was appointed meanwhile could not climb past them, so one climb corrects all.
    """
    first = w[NEXT]
    node = w[LEAVES] + w[ACTING]
    while node > 1:
        node >>= 1
        x[first + node] = min(x[first + 2 * node], x[first + 2 * node + 1])
    w[ACTING] = -1


@compiled
def next_source(w, x):
    """The source that acts next; of several at the same time the one numbered lowest."""
    first, leaves = w[NEXT], w[LEAVES]
    node = 1
    while node < leaves:
        node *= 2
        node += x[first + node] > x[first + node + 1]
    return node - leaves


@compiled
def rate_of(w, host):
    """Seconds of work that each running device of a host does in a second."""
    return min(1.0, w[w[HOST_SLOTS] + host] / max(1, w[w[COMPUTING] + host]))


@compiled
def change_computing(w, x, host, change):
    """Bring the virtual time of a host to the present before more or fewer devices share it."""
    x[w[PROGRESS] + host] += rate_of(w, host) * (x[NOW] - x[w[SINCE] + host])
    x[w[SINCE] + host] = x[NOW]
    w[w[COMPUTING] + host] += change


@compiled
def retime(w, x, host):
    """Move the ends of all work on a host to its present rate."""
    rate = rate_of(w, host)
    for k in range(w[w[HOST_DEVICE_START] + host], w[w[HOST_DEVICE_START] + host + 1]):
        device = w[w[HOST_DEVICE] + k]
        if w[w[RUNNING] + device]:
            left = max(0.0, x[w[FINISH] + device] - x[w[PROGRESS] + host])
            appoint(w, x, device, x[NOW] + left / rate)


@compiled
def occupy(w, x, device, seconds):
    """Begin work on a device; where the host's slots are limited, slow the others down."""
    host = w[w[SHARED_HOST] + device]
    w[w[RUNNING] + device] = 1
    if host < 0:
        appoint(w, x, device, x[NOW] + seconds)
    else:
        change_computing(w, x, host, 1)
        x[w[FINISH] + device] = x[w[PROGRESS] + host] + seconds
        retime(w, x, host)


@compiled
def vacate(w, x, device):
    """End work on a device; where the host's slots are limited, speed the others up."""
    host = w[w[SHARED_HOST] + device]
    w[w[RUNNING] + device] = 0
    if host >= 0:
        change_computing(w, x, host, -1)
        retime(w, x, host)


@compiled
def start_if_ready(w, x, device):
    """Start the next piece of a device that is idle and has its inputs."""
    if w[w[RUNNING] + device]:
        return
    position, end = w[w[POSITION] + device], w[w[ORDER_END] + device]
    if position >= end:
        if position == end and w[w[BUCKETS_LEFT] + device] == 0:
            if w[SPANS]:
                x[w[STEP_SPAN] + 2 * device] = x[NOW]
            occupy(w, x, device, x[w[SECONDS] + PIECES * device + STEP])
        return
    kind, segment = w[w[ORDER_KIND] + position], w[w[SEGMENT] + device]
    if segment == 0:
        if kind <= 2:
            row = 2 * device + (kind > 0)
            if w[w[INPUTS] + row * w[MICRO_BATCHES] + w[w[ORDER_MICRO] + position]] != 0:
                return
        if w[SPANS]:
            x[w[ACTION_SPAN] + 2 * (w[w[SPAN_OFFSET] + device] + position)] = x[NOW]
    if position == w[w[LAST_BACKWARD] + device]:
        seconds = x[w[w[SEGMENT_START] + device] + segment]
    else:
        seconds = x[w[SECONDS] + PIECES * device + kind]
    occupy(w, x, device, seconds)


@compiled
def end_piece(w, x, device):
    """A piece of work has ended: send what it made, then go on."""
    position = w[w[POSITION] + device]
    vacate(w, x, device)
    if position == w[w[ORDER_END] + device]:
        if w[SPANS]:
            x[w[STEP_SPAN] + 2 * device + 1] = x[NOW]
        w[w[POSITION] + device] += 1
        return
    segment = w[w[SEGMENT] + device] if position == w[w[LAST_BACKWARD] + device] else -1
    if segment < 0 or segment + 1 == w[w[SEGMENT_COUNT] + device]:
        if w[SPANS]:
            x[w[ACTION_SPAN] + 2 * (w[w[SPAN_OFFSET] + device] + position) + 1] = x[NOW]
        w[w[POSITION] + device] += 1
        w[w[SEGMENT] + device] = 0
        send(w, x, device, w[w[ORDER_KIND] + position], w[w[ORDER_MICRO] + position])
    else:
        w[w[SEGMENT] + device] += 1
    if segment >= 0:
        complete_buckets(w, x, w[w[FIRST_SEGMENT] + device] + segment)
    start_if_ready(w, x, device)


@compiled
def send(w, x, device, kind, micro_batch):
    """Offer what a forward or backward sends."""
    if kind <= 2:
        row = w[SENDS_START] + 2 * device + (kind == 0)
        for lane in range(w[row], w[row + 1]):
            offer(w, x, lane, micro_batch)


@compiled
def complete_buckets(w, x, segment):
    """Offer the buckets whose last gradients came with ``segment``."""
    row = w[COMPLETION_START] + segment
    for k in range(w[row], w[row + 1]):
        bucket = w[w[COMPLETION] + k]
        w[w[MEMBERS_LEFT] + bucket] -= 1
        if w[w[MEMBERS_LEFT] + bucket] == 0:
            lane = w[MESSAGES] + w[w[GROUP_OF_BUCKET] + bucket]
            item = w[MESSAGES] * w[MICRO_BATCHES] + bucket - w[w[ITEM_START] + lane]
            offer(w, x, lane, item)


@compiled
def seconds_of_item(w, x, lane, item):
    """How long a message or a bucket takes."""
    if lane < w[MESSAGES]:
        return x[w[MESSAGE_SECONDS] + lane]
    first_bucket = w[w[ITEM_START] + lane] - w[MESSAGES] * w[MICRO_BATCHES]
    return x[w[BUCKET_SECONDS] + first_bucket + item]


@compiled
def record_item(w, x, lane, item, end_s):
    """Write down when a message or bucket passes, where that is wanted."""
    if w[SPANS]:
        span = w[ITEM_SPAN] + 2 * (w[w[ITEM_START] + lane] + item)
        x[span] = x[NOW]
        x[span + 1] = end_s


@compiled
def can_start(w, lane):
    """Whether everything that a lane needs is free."""
    for k in range(w[w[RESOURCE_START] + lane], w[w[RESOURCE_START] + lane + 1]):
        if w[w[BUSY] + w[w[RESOURCE] + k]]:
            return False
    return True


@compiled
def set_busy(w, lane, busy):
    """Occupy or free everything that a lane needs."""
    for k in range(w[w[RESOURCE_START] + lane], w[w[RESOURCE_START] + lane + 1]):
        w[w[BUSY] + w[w[RESOURCE] + k]] = busy


@compiled
def offer(w, x, lane, item):
    """A message or bucket is ready: start it if it can, else let it wait."""
    if seconds_of_item(w, x, lane, item) == 0.0:
        record_item(w, x, lane, item, x[NOW])
        arrive(w, x, lane, item)
        return
    head, tail = w[w[HEAD] + lane], w[w[TAIL] + lane]
    if head == tail and can_start(w, lane):
        start_transfer(w, x, lane, item)
        return
    place = w[w[ITEM_START] + lane] + tail
    w[w[QUEUE] + place] = item
    w[w[QUEUE_SEQUENCE] + place] = w[WAITED]
    w[w[TAIL] + lane] = tail + 1
    w[WAITED] += 1
    w[WAITING] += 1


@compiled
def start_transfer(w, x, lane, item):
    """Occupy the lane's resources with an item."""
    w[w[CURRENT] + lane] = item
    set_busy(w, lane, 1)
    end_s = x[NOW] + seconds_of_item(w, x, lane, item)
    record_item(w, x, lane, item, end_s)
    appoint(w, x, w[DEVICES] + lane, end_s)


@compiled
def first_waiting(w, lane):
    """Take the item that has waited longest from a lane's queue."""
    head = w[w[HEAD] + lane]
    w[w[HEAD] + lane] = head + 1
    w[WAITING] -= 1
    return w[w[QUEUE] + w[w[ITEM_START] + lane] + head]


@compiled
def next_startable(w, freed):
    """The lane that starts next on what ``freed`` has left, or -1: messages first, then oldest."""
    best, best_rank = -1, np.int64(0)
    for k in range(w[w[RESOURCE_START] + freed], w[w[RESOURCE_START] + freed + 1]):
        row = w[USER_START] + w[w[RESOURCE] + k]
        for u in range(w[row], w[row + 1]):
            lane = w[w[USER] + u]
            head = w[w[HEAD] + lane]
            if w[w[TAIL] + lane] > head:
                rank = w[w[QUEUE_SEQUENCE] + w[w[ITEM_START] + lane] + head]
                rank += LAST if lane >= w[MESSAGES] else 0
                if (best < 0 or rank < best_rank) and can_start(w, lane):
                    best, best_rank = lane, rank
    return best


@compiled
def end_transfer(w, x, lane):
    """Free the lane's resources, start what waited for them, deliver."""
    set_busy(w, lane, 0)
    item = w[w[CURRENT] + lane]
    while w[WAITING] > 0:
        following = next_startable(w, lane)
        if following < 0:
            break
        start_transfer(w, x, following, first_waiting(w, following))
    arrive(w, x, lane, item)


@compiled
def arrive(w, x, lane, item):
    """Deliver a message, or the sum of a bucket."""
    if lane < w[MESSAGES]:
        row = w[w[INPUT_ROW] + lane]
        w[w[INPUTS] + row * w[MICRO_BATCHES] + item] -= 1
        start_if_ready(w, x, row >> 1)
    else:
        row = w[MEMBER_START] + lane - w[MESSAGES]
        for k in range(w[row], w[row + 1]):
            member = w[w[MEMBER] + k]
            w[w[BUCKETS_LEFT] + member] -= 1
            start_if_ready(w, x, member)


def play_to_the_end(whole, real):
    """Play to the end in place; the time of the last event."""
    w, x = borrowed(whole), borrowed(real)
    w[ACTING] = -1
    for device in range(w[DEVICES]):
        start_if_ready(w, x, device)
    root = w[NEXT] + 1
    while x[root] < np.inf:
        x[NOW] = x[root]
        source = next_source(w, x)
        w[ACTING] = source
        x[w[NEXT] + w[LEAVES] + source] = np.inf
        if source < w[DEVICES]:
            end_piece(w, x, source)
        else:
            end_transfer(w, x, source - w[DEVICES])
        finish_acting(w, x)
    return x[NOW]


run: Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], float] = numba.njit(cache=True)(
    play_to_the_end
)
"""`play_to_the_end`, compiled; kept on disk, so that only the first call ever compiles it."""
