"""The rules of `penstock.simulate.plain` on flat arrays, compiled by numba.

A property test checks that both engines agree up to rounding. The sources of events, compute
streams and then lanes, are in a tournament tree (`penstock.simulate.tournament`). For its speed see
benchmarks/simulator.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

import numpy as np
import numpy.typing as npt

from penstock.borrowed import borrowed
from penstock.schedule.action import KIND_CODES
from penstock.simulate.computing import TALKS, TALKS_TOO, occupy, vacate
from penstock.simulate.layout import (
    ACTING,
    ACTION_SPAN,
    BLOCKED_SENDER,
    BLOCKING,
    BUCKET_SECONDS,
    BUCKET_START,
    BUCKETS_EACH,
    BUCKETS_LEFT,
    BUSY,
    COMPLETION,
    COMPLETION_START,
    CURRENT,
    ENDING,
    FIRST_LEAF,
    FIRST_REPLICA,
    FIRST_SEGMENT,
    GROUP_OF_BUCKET,
    HEAD,
    INPUT_ROW,
    INPUTS,
    INSTANCE_MASK,
    INSTANCE_SHIFT,
    ITEM_SPAN,
    ITEM_START,
    KIND_MASK,
    MEMBER,
    MEMBER_START,
    MEMBERS_EACH,
    MEMBERS_LEFT,
    MESSAGE_SECONDS,
    MESSAGES,
    MICRO_BATCHES,
    MICRO_SHIFT,
    NEXT,
    NOW,
    ORDER_END,
    PIECES,
    POSITION,
    QUEUE,
    QUEUE_SEQUENCE,
    RECEIVER,
    REPLICAS,
    RESOURCE,
    RESOURCE_START,
    ROUNDS_DONE,
    RUNNING,
    SECONDS,
    SEGMENT,
    SEGMENT_COUNT,
    SEGMENT_START,
    SENDS_START,
    SEVERAL,
    SPAN_OFFSET,
    SPANS,
    STEP,
    STEP_SECONDS,
    STEPS_DONE,
    STREAM_REPLICA,
    STREAMS,
    STREAMS_EACH,
    TAIL,
    TALKS_AT_ONCE,
    UNSENT,
    UPDATES,
    USER,
    USER_START,
    WAIT,
    WAITED,
    WAITING,
    WAITING_FOR,
    WIRES,
)
from penstock.simulate.tournament import ROOT, appoint, finish_acting, next_source

__all__ = ["play_to_the_end"]

BACKWARD, RECOMPUTE = KIND_CODES["B"], KIND_CODES["R"]

LAST = np.int64(1) << 60
"""Added to the rank of reductions, so that messages go first."""


def inputs_left(w, row, word):
    """How many messages (in the third row of a replica: forwards) an action still waits for."""
    return w[w[INPUTS] + row * w[MICRO_BATCHES] + (word >> MICRO_SHIFT)]


def is_ready(w, replica, kind, word):
    """Whether the inputs of an action have arrived."""
    if kind <= 2 and inputs_left(w, 2 * replica + (kind > 0), word) != 0:
        return False
    if w[STREAMS_EACH] == 1 or kind == 0 or kind == 3:
        return True
    return inputs_left(w, 2 * w[REPLICAS] + replica, word) == 0


def start_if_ready(w, x, stream):
    """Start the next piece of a stream if it is idle and its inputs have arrived."""
    if w[w[RUNNING] + stream] or stream == w[ENDING]:
        return
    if w[BLOCKING] and w[w[UNSENT] + stream // w[STREAMS_EACH]] > 0:
        return
    position = w[w[POSITION] + stream]
    if position == w[w[ORDER_END] + stream]:
        return
    word = w[position]
    kind = word & KIND_MASK
    if kind >= STEP:
        device = stream // w[STREAMS_EACH]
        if kind == STEP:
            start_step(w, x, stream, device, position)
            return
        # WAIT and HOLD take no time; a forward follows them.
        while kind > STEP:
            if not is_over(w, stream, device, word):
                return
            position += 1
            w[w[POSITION] + stream] = position
            word = w[position]
            kind = word & KIND_MASK
    replica = w[w[FIRST_REPLICA] + ((word >> INSTANCE_SHIFT) & INSTANCE_MASK)]
    replica += w[w[STREAM_REPLICA] + stream]
    segment = w[w[SEGMENT] + stream]
    if segment == 0:
        if not is_ready(w, replica, kind, word):
            return
        if w[SPANS]:
            x[w[ACTION_SPAN] + 2 * (w[w[SPAN_OFFSET] + stream] + position)] = x[NOW]
    if word & UPDATES:
        seconds = x[w[w[SEGMENT_START] + replica] + segment]
    else:
        seconds = x[w[SECONDS] + PIECES * replica + kind]
    claim_s = x[w[SECONDS] + PIECES * replica + (0 if kind == 0 or kind == RECOMPUTE else BACKWARD)]
    occupy(w, x, stream, seconds, claim_s)


def is_over(w, stream, device, word):
    """Whether a WAIT or a HOLD is over (see `penstock.simulate.layout`)."""
    number = word >> MICRO_SHIFT
    if word & KIND_MASK == WAIT:
        return w[w[STEPS_DONE] + device] >= number
    return w[w[ORDER_END] + stream + 1] - w[w[POSITION] + stream + 1] <= number


def start_step(w, x, stream, device, position):
    """Start the optimizer step of a device once all its gradients are reduced."""
    if w[w[BUCKETS_LEFT] + device] == 0:
        if w[SPANS]:
            x[w[ACTION_SPAN] + 2 * (w[w[SPAN_OFFSET] + stream] + position)] = x[NOW]
        occupy(w, x, stream, x[w[STEP_SECONDS] + device], x[w[STEP_SECONDS] + device])


def end_piece(w, x, stream):
    """End a piece of work: send its results, then start what can start."""
    position = w[w[POSITION] + stream]
    word = w[position]
    kind = word & KIND_MASK
    vacate(w, x, stream)
    w[ENDING] = stream
    if w[BLOCKING]:
        start_waiting(w, x, w[WIRES] + stream)
    if kind == STEP:
        device = stream // w[STREAMS_EACH]
        w[w[BUCKETS_LEFT] + device] += w[w[BUCKETS_EACH] + device]
        w[w[STEPS_DONE] + device] += 1
        end_word(w, x, stream, position)
    else:
        replica = w[w[FIRST_REPLICA] + ((word >> INSTANCE_SHIFT) & INSTANCE_MASK)]
        end_action(w, x, stream, position, word, replica + w[w[STREAM_REPLICA] + stream])
    w[ENDING] = -1
    if w[STREAMS_EACH] == 2:
        start_if_ready(w, x, stream & ~1)
        start_if_ready(w, x, stream | 1)
    else:
        start_if_ready(w, x, stream)


def end_word(w, x, stream, position):
    """Record the end of an action or a step, and advance to the next one."""
    if w[SPANS]:
        x[w[ACTION_SPAN] + 2 * (w[w[SPAN_OFFSET] + stream] + position) + 1] = x[NOW]
    w[w[POSITION] + stream] = position + 1


def end_action(w, x, stream, position, word, replica):
    """End an action or a segment of one: send messages and complete buckets."""
    segment, kind = -1, word & KIND_MASK
    if word & UPDATES:
        segment = w[w[SEGMENT] + stream]
        w[w[SEGMENT] + stream] = segment + 1
    if segment < 0 or segment + 1 == w[w[SEGMENT_COUNT] + replica]:
        w[w[SEGMENT] + stream] = 0
        end_word(w, x, stream, position)
        if kind <= 2:
            row = w[SENDS_START] + 2 * replica + (kind == 0)
            for lane in range(w[row], w[row + 1]):
                offer(w, x, lane, word >> MICRO_SHIFT)
        if kind == 0 and w[STREAMS_EACH] == 2:
            row = 2 * w[REPLICAS] + replica
            w[w[INPUTS] + row * w[MICRO_BATCHES] + (word >> MICRO_SHIFT)] = 0
    if segment >= 0:
        complete_buckets(w, x, w[w[FIRST_SEGMENT] + replica] + segment)


def complete_buckets(w, x, segment):
    """Offer the buckets whose last gradients came with ``segment``."""
    row = w[COMPLETION_START] + segment
    for k in range(w[row], w[row + 1]):
        bucket = w[w[COMPLETION] + k]
        w[w[MEMBERS_LEFT] + bucket] -= 1
        if w[w[MEMBERS_LEFT] + bucket] == 0:
            group = w[w[GROUP_OF_BUCKET] + bucket]
            w[w[MEMBERS_LEFT] + bucket] = w[w[MEMBERS_EACH] + group]
            first = w[w[BUCKET_START] + group]
            size = w[w[BUCKET_START] + group + 1] - first
            item = w[w[ROUNDS_DONE] + bucket] * size + bucket - first
            w[w[ROUNDS_DONE] + bucket] += 1
            offer(w, x, w[MESSAGES] + group, item)


def seconds_of_item(w, x, lane, item):
    """Seconds of a message or a bucket."""
    if lane < w[MESSAGES]:
        return x[w[MESSAGE_SECONDS] + lane]
    group = lane - w[MESSAGES]
    first = w[w[BUCKET_START] + group]
    return x[w[BUCKET_SECONDS] + first + item % (w[w[BUCKET_START] + group + 1] - first)]


def record_item(w, x, lane, item, end_s):
    """Record the span of a message or bucket, if spans are recorded."""
    if w[SPANS]:
        span = w[ITEM_SPAN] + 2 * (w[w[ITEM_START] + lane] + item)
        x[span] = x[NOW]
        x[span + 1] = end_s


def can_start(w, lane):
    """Whether all resources of a lane are free."""
    for k in range(w[w[RESOURCE_START] + lane], w[w[RESOURCE_START] + lane + 1]):
        if w[w[BUSY] + w[w[RESOURCE] + k]] & 1:
            return False
    return True


def set_busy(w, lane, busy):
    """Occupy or free all resources of a lane."""
    if w[BLOCKING] & SEVERAL:
        count_talks(w, lane, busy)
        return
    for k in range(w[w[RESOURCE_START] + lane], w[w[RESOURCE_START] + lane + 1]):
        w[w[BUSY] + w[w[RESOURCE] + k]] = busy


def count_talks(w, lane, busy):
    """`set_busy` where some devices run several transfers at once."""
    for k in range(w[w[RESOURCE_START] + lane], w[w[RESOURCE_START] + lane + 1]):
        resource = w[w[RESOURCE] + k]
        if resource >= w[WIRES] and w[w[TALKS_AT_ONCE] + resource - w[WIRES]]:
            w[w[BUSY] + resource] += TALKS_TOO if busy else -TALKS_TOO
        else:
            w[w[BUSY] + resource] = busy


def offer(w, x, lane, item):
    """A message or bucket is ready: start it, or queue it.

    No queued item can start at this moment: it would have started when its resources became free.
    """
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
    count_waiting(w, lane, 1)


def count_waiting(w, lane, change):
    """Count the queued items at each resource of a lane, and at its sender."""
    w[WAITING] += change
    if lane < w[MESSAGES] and w[w[BLOCKED_SENDER] + lane] >= 0:
        w[w[UNSENT] + w[w[BLOCKED_SENDER] + lane]] += change
    for k in range(w[w[RESOURCE_START] + lane], w[w[RESOURCE_START] + lane + 1]):
        w[w[WAITING_FOR] + w[w[RESOURCE] + k]] += change


def start_transfer(w, x, lane, item):
    """Occupy the lane's resources with an item, and set when it ends."""
    w[w[CURRENT] + lane] = item
    set_busy(w, lane, TALKS)
    end_s = x[NOW] + seconds_of_item(w, x, lane, item)
    record_item(w, x, lane, item, end_s)
    appoint(w, x, w[STREAMS] + lane, end_s)


def first_waiting(w, lane):
    """Take the first item from a lane's queue."""
    head = w[w[HEAD] + lane]
    w[w[HEAD] + lane] = head + 1
    count_waiting(w, lane, -1)
    return w[w[QUEUE] + w[w[ITEM_START] + lane] + head]


def best_waiting(w, resource, best):
    """The better of ``best`` and the lanes that wait for ``resource`` and can start now."""
    if w[w[WAITING_FOR] + resource] == 0:
        return best
    best_rank = rank_of(w, best) if best >= 0 else 2 * LAST
    row = w[USER_START] + resource
    for u in range(w[row], w[row + 1]):
        lane = w[w[USER] + u]
        if w[w[TAIL] + lane] > w[w[HEAD] + lane]:
            rank = rank_of(w, lane)
            if rank < best_rank and can_start(w, lane):
                best, best_rank = lane, rank
    return best


def rank_of(w, lane):
    """The rank of a lane's first item among all that wait: messages first, then by age."""
    rank = w[w[QUEUE_SEQUENCE] + w[w[ITEM_START] + lane] + w[w[HEAD] + lane]]
    return rank + LAST if lane >= w[MESSAGES] else rank


def start_waiting(w, x, resource):
    """Start what waited for a resource that is free now."""
    while w[WAITING] > 0:
        following = best_waiting(w, resource, -1)
        if following < 0:
            break
        start_transfer(w, x, following, first_waiting(w, following))


def end_transfer(w, x, lane):
    """Free the lane's resources, start what waited for them, deliver the item, resume work."""
    set_busy(w, lane, 0)
    item = w[w[CURRENT] + lane]
    first, end = w[w[RESOURCE_START] + lane], w[w[RESOURCE_START] + lane + 1]
    while w[WAITING] > 0:
        following = -1
        for k in range(first, end):
            following = best_waiting(w, w[w[RESOURCE] + k], following)
        if following < 0:
            break
        start_transfer(w, x, following, first_waiting(w, following))
    arrive(w, x, lane, item)
    if w[BLOCKING]:
        for k in range(first, end):
            resource = w[w[RESOURCE] + k]
            if resource >= w[WIRES]:
                start_if_ready(w, x, resource - w[WIRES])


def arrive(w, x, lane, item):
    """Deliver a message, or the sum of a bucket."""
    if lane < w[MESSAGES]:
        w[w[INPUTS] + w[w[INPUT_ROW] + lane] * w[MICRO_BATCHES] + item] -= 1
        start_if_ready(w, x, w[w[RECEIVER] + lane])
    else:
        row, each = w[MEMBER_START] + lane - w[MESSAGES], w[STREAMS_EACH]
        for k in range(w[row], w[row + 1]):
            member = w[w[MEMBER] + k]
            w[w[BUCKETS_LEFT] + member] -= 1
            start_if_ready(w, x, member * each + each - 1)


def play_to_the_end(whole: npt.NDArray[np.int64], real: npt.NDArray[np.float64]) -> float:
    """Play to the end, in place; returns the time of the last event in seconds."""
    w, x = borrowed(whole), borrowed(real)
    w[ACTING] = w[ENDING] = -1
    for stream in range(w[STREAMS]):
        start_if_ready(w, x, stream)
    root = w[NEXT] + ROOT
    while x[root] < np.inf:
        x[NOW] = x[root]
        source = next_source(w, x)
        w[ACTING] = source
        x[w[NEXT] + w[FIRST_LEAF] + source] = np.inf
        if source < w[STREAMS]:
            end_piece(w, x, source)
        else:
            end_transfer(w, x, source - w[STREAMS])
        finish_acting(w, x)
    return x[NOW]
