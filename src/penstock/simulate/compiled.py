"""The rules of `penstock.simulate.plain` on flat arrays, compiled by numba.

Equal to the plain engine to rounding (a property test holds them together); the sources of events
stand in an indexed binary heap. The fields are those of `penstock.simulate.arrays`. Speed: see
benchmarks/simulator.
"""

# numba has no types: its decorator makes every compiled function unknown to a strict checker.
# pyright: basic

import numba
import numpy as np

from penstock.simulate.arrays import (
    ACTION_SPAN,
    ACTION_START,
    BUCKETS_LEFT,
    BUSY,
    COMPUTING,
    CURRENT,
    DEVICES,
    DIRECTION,
    FINISH,
    GROUP_OF_BUCKET,
    HEAD,
    HEAP,
    HEAP_SIZE,
    HOST,
    HOST_DEVICE,
    HOST_DEVICE_START,
    HOST_SLOTS,
    INPUTS,
    ITEM_SECONDS,
    ITEM_SPAN,
    ITEM_START,
    KEY,
    KIND_COUNT,
    LAST_BACKWARD,
    MEMBER,
    MEMBER_START,
    MEMBERS_LEFT,
    MESSAGES,
    MICRO_BATCHES,
    NOW,
    ORDER_KIND,
    ORDER_MICRO,
    ORDER_START,
    PLACE,
    POSITION,
    PROGRESS,
    QUEUE,
    QUEUE_SEQUENCE,
    RECEIVER,
    RESOURCE,
    RESOURCE_START,
    RUNNING,
    SECONDS,
    SEGMENT,
    SEGMENT_BUCKET,
    SEGMENT_BUCKET_START,
    SEGMENT_SECONDS,
    SEGMENT_START,
    SENDS,
    SENDS_START,
    SINCE,
    STAGE,
    STEP_SECONDS,
    STEP_SPAN,
    TAIL,
    USER,
    USER_START,
    WAITED,
    WAITING,
    Arrays,
    OrderArrays,
    arrays_of,
)
from penstock.simulate.trace import Trace
from penstock.simulate.workload import Workload

__all__ = ["iteration_s", "play", "run"]

compiled = numba.njit(cache=True)

LAST = np.int64(1) << 60
"""Added to the rank of reductions, which let messages go first."""


@compiled
def sooner(w, x, a, b):
    """Whether source ``a`` acts before source ``b``; ties by number."""
    key_a, key_b = x[w[KEY] + a], x[w[KEY] + b]
    return key_a < key_b or (key_a == key_b and a < b)


@compiled
def put(w, place, source):
    """Let ``source`` stand at ``place`` of the heap."""
    w[w[HEAP] + place] = source
    w[w[PLACE] + source] = place


@compiled
def sift_up(w, x, place):
    """Move the source at ``place`` of the heap up to where it belongs."""
    source = w[w[HEAP] + place]
    while place > 0:
        parent = (place - 1) >> 1
        above = w[w[HEAP] + parent]
        if not sooner(w, x, source, above):
            break
        put(w, place, above)
        place = parent
    put(w, place, source)


@compiled
def sift_down(w, x, place):
    """Move the source at ``place`` of the heap down to where it belongs."""
    source, size = w[w[HEAP] + place], w[HEAP_SIZE]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        below = w[w[HEAP] + child]
        if child + 1 < size and sooner(w, x, w[w[HEAP] + child + 1], below):
            child += 1
            below = w[w[HEAP] + child]
        if not sooner(w, x, below, source):
            break
        put(w, place, below)
        place = child
    put(w, place, source)


@compiled
def schedule_event(w, x, source, time_s):
    """Let ``source`` act at ``time_s`` instead of any earlier appointment."""
    x[w[KEY] + source] = time_s
    place = w[w[PLACE] + source]
    if place < 0:
        place = w[HEAP_SIZE]
        w[HEAP_SIZE] += 1
        put(w, place, source)
        sift_up(w, x, place)
    else:
        sift_up(w, x, place)
        sift_down(w, x, w[w[PLACE] + source])


@compiled
def pop_event(w, x):
    """Take the source that acts next from the heap."""
    source = w[w[HEAP]]
    w[w[PLACE] + source] = -1
    w[HEAP_SIZE] -= 1
    if w[HEAP_SIZE] > 0:
        put(w, 0, w[w[HEAP] + w[HEAP_SIZE]])
        sift_down(w, x, 0)
    return source


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
            schedule_event(w, x, device, x[NOW] + left / rate)


@compiled
def occupy(w, x, device, seconds):
    """Begin work on a device; where the host's slots are limited, slow the others down."""
    host = w[w[HOST] + device]
    w[w[RUNNING] + device] = 1
    if w[w[HOST_SLOTS] + host] == 0:
        schedule_event(w, x, device, x[NOW] + seconds)
    else:
        change_computing(w, x, host, 1)
        x[w[FINISH] + device] = x[w[PROGRESS] + host] + seconds
        retime(w, x, host)


@compiled
def vacate(w, x, device):
    """End work on a device; where the host's slots are limited, speed the others up."""
    host = w[w[HOST] + device]
    w[w[RUNNING] + device] = 0
    if w[w[HOST_SLOTS] + host] != 0:
        change_computing(w, x, host, -1)
        retime(w, x, host)


@compiled
def start_if_ready(w, x, device):
    """Start the next piece of a device that is idle and has its inputs."""
    if w[w[RUNNING] + device]:
        return
    stage, position = w[w[STAGE] + device], w[w[POSITION] + device]
    at = w[w[ORDER_START] + stage] + position
    end = w[w[ORDER_START] + stage + 1]
    if at == end:
        if w[w[BUCKETS_LEFT] + device] == 0:
            x[w[STEP_SPAN] + 2 * device] = x[NOW]
            occupy(w, x, device, x[w[STEP_SECONDS] + device])
        return
    if at > end:
        return
    kind, segment = w[w[ORDER_KIND] + at], w[w[SEGMENT] + device]
    if kind <= 2 and segment == 0:
        row = 2 * device + (kind > 0)
        if w[w[INPUTS] + row * w[MICRO_BATCHES] + w[w[ORDER_MICRO] + at]] != 0:
            return
    if segment == 0:
        x[w[ACTION_SPAN] + 2 * (w[w[ACTION_START] + device] + position)] = x[NOW]
    if position == w[w[LAST_BACKWARD] + stage]:
        seconds = x[w[SEGMENT_SECONDS] + w[w[SEGMENT_START] + device] + segment]
    else:
        seconds = x[w[SECONDS] + w[KIND_COUNT] * device + kind]
    occupy(w, x, device, seconds)


@compiled
def end_piece(w, x, device):
    """A piece of work has ended: send what it made, then go on."""
    stage, position = w[w[STAGE] + device], w[w[POSITION] + device]
    vacate(w, x, device)
    at = w[w[ORDER_START] + stage] + position
    if at == w[w[ORDER_START] + stage + 1]:
        x[w[STEP_SPAN] + 2 * device + 1] = x[NOW]
        w[w[POSITION] + device] += 1
        return
    segment = -1
    ends = True
    if position == w[w[LAST_BACKWARD] + stage]:
        segment = w[w[SEGMENT_START] + device] + w[w[SEGMENT] + device]
        ends = segment + 1 == w[w[SEGMENT_START] + device + 1]
    if ends:
        x[w[ACTION_SPAN] + 2 * (w[w[ACTION_START] + device] + position) + 1] = x[NOW]
        w[w[POSITION] + device] += 1
        w[w[SEGMENT] + device] = 0
        send(w, x, device, w[w[ORDER_KIND] + at], w[w[ORDER_MICRO] + at])
    else:
        w[w[SEGMENT] + device] += 1
    if segment >= 0:
        complete_buckets(w, x, segment)
    start_if_ready(w, x, device)


@compiled
def send(w, x, device, kind, micro_batch):
    """Offer what a forward or backward sends."""
    if kind <= 2:
        row = w[SENDS_START] + 2 * device + (kind > 0)
        for k in range(w[row], w[row + 1]):
            offer(w, x, w[w[SENDS] + k], micro_batch)


@compiled
def complete_buckets(w, x, segment):
    """Offer the buckets whose last gradients came with ``segment``."""
    row = w[SEGMENT_BUCKET_START] + segment
    for k in range(w[row], w[row + 1]):
        bucket = w[w[SEGMENT_BUCKET] + k]
        w[w[MEMBERS_LEFT] + bucket] -= 1
        if w[w[MEMBERS_LEFT] + bucket] == 0:
            lane = w[MESSAGES] + w[w[GROUP_OF_BUCKET] + bucket]
            item = w[MESSAGES] * w[MICRO_BATCHES] + bucket - w[w[ITEM_START] + lane]
            offer(w, x, lane, item)


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
    first = w[w[ITEM_START] + lane]
    if x[w[ITEM_SECONDS] + first + item] == 0.0:
        x[w[ITEM_SPAN] + 2 * (first + item)] = x[NOW]
        x[w[ITEM_SPAN] + 2 * (first + item) + 1] = x[NOW]
        arrive(w, x, lane, item)
        return
    tail = w[w[TAIL] + lane]
    w[w[QUEUE] + first + tail] = item
    w[w[QUEUE_SEQUENCE] + first + tail] = w[WAITED]
    w[w[TAIL] + lane] = tail + 1
    w[WAITED] += 1
    w[WAITING] += 1
    if tail == w[w[HEAD] + lane] and can_start(w, lane):
        start_transfer(w, x, lane)


@compiled
def start_transfer(w, x, lane):
    """Occupy the lane's resources with the first item that waits."""
    first = w[w[ITEM_START] + lane]
    item = w[w[QUEUE] + first + w[w[HEAD] + lane]]
    w[w[HEAD] + lane] += 1
    w[WAITING] -= 1
    w[w[CURRENT] + lane] = item
    set_busy(w, lane, 1)
    end_s = x[NOW] + x[w[ITEM_SECONDS] + first + item]
    x[w[ITEM_SPAN] + 2 * (first + item)] = x[NOW]
    x[w[ITEM_SPAN] + 2 * (first + item) + 1] = end_s
    schedule_event(w, x, w[DEVICES] + lane, end_s)


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
        start_transfer(w, x, following)
    arrive(w, x, lane, item)


@compiled
def arrive(w, x, lane, item):
    """Deliver a message, or the sum of a bucket."""
    if lane < w[MESSAGES]:
        receiver = w[w[RECEIVER] + lane]
        row = 2 * receiver + w[w[DIRECTION] + lane]
        w[w[INPUTS] + row * w[MICRO_BATCHES] + item] -= 1
        start_if_ready(w, x, receiver)
    else:
        row = w[MEMBER_START] + lane - w[MESSAGES]
        for k in range(w[row], w[row + 1]):
            member = w[w[MEMBER] + k]
            w[w[BUCKETS_LEFT] + member] -= 1
            start_if_ready(w, x, member)


@compiled
def run(w, x):
    """Play to the end in place (``w`` whole numbers, ``x`` reals); the time of the last event."""
    for device in range(w[DEVICES]):
        start_if_ready(w, x, device)
    while w[HEAP_SIZE] > 0:
        source = pop_event(w, x)
        x[NOW] = x[w[KEY] + source]
        if source < w[DEVICES]:
            end_piece(w, x, source)
        else:
            end_transfer(w, x, source - w[DEVICES])
    return x[NOW]


def iteration_s(workload: Workload, orders: OrderArrays | None = None) -> float:
    """Seconds of one iteration, without making a trace."""
    arrays = arrays_of(workload, orders)
    return float(run(arrays.whole, arrays.real))


def play(workload: Workload) -> Trace:
    """Play one iteration; equal to `penstock.simulate.plain.play`."""
    arrays = arrays_of(workload)
    end_s = float(run(arrays.whole, arrays.real))
    buckets = sum(len(group.buckets) for group in workload.reductions)
    messages = len(workload.messages) * workload.micro_batches
    items = spans(arrays, ITEM_SPAN, messages + buckets)
    return Trace(
        actions=spans(arrays, ACTION_SPAN, workload.actions),
        messages=items[:messages],
        buckets=items[messages:],
        steps=spans(arrays, STEP_SPAN, len(workload.devices)),
        iteration_s=end_s,
    )


def spans(arrays: Arrays, field: int, count: int) -> tuple[tuple[float, float], ...]:
    """``count`` pairs of start and end."""
    first = arrays.whole[field]
    pairs = arrays.real[first : first + 2 * count].reshape(-1, 2).tolist()
    return tuple((start, end) for start, end in pairs)
