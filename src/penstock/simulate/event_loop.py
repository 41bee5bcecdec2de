"""The rules of the simulator, on one flat array, compiled by numba.

    compute     a device has one stream, or two if forwards run beside backwards; actions start in
                schedule order once their inputs are there (a forward beside backwards once all
                actions before it have ended); the optimizer steps once the device's gradients are
                reduced, and the next iteration follows the step
    shares      while both streams of a device compute, they share it in proportion to the seconds
                of their whole actions; one alone has the whole device
    slots       of the devices of a host, `host_slots` compute at full speed; if more compute, all
                of them slow down alike: rate = slots / computing
    messages    are sent when their action has ended; a message occupies the sender's send engine,
                the receiver's receive engine and, between hosts, both ports, all at once; of those
                that wait, the one that was ready first starts first; a blocked one does not block
                others; stages on one device exchange no messages
    reductions  a bucket occupies both engines of its members (and ports) once all of them have its
                gradients; messages that can start go first
    turns       half-duplex: both engines of a device are one, and so are both ports of a host;
                a device that does not overlap starts no transfer while it computes, and computes
                nothing during a transfer nor while a message of its own waits to be sent
    links       on a host with separate links, a message between two of its devices occupies the
                link from one to the other (half-duplex: between them) instead of engines, and a
                device that does not overlap may run several transfers at once; reductions use the
                engines, as if on links that no message of the host uses

Events at the same time are handled in the order: streams, messages, reductions.

The sources of events, compute streams and then lanes, are in a tournament tree
(`penstock.simulate.tournament`). For its speed see benchmarks/simulator.
"""


# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import KIND_CODES
from penstock.simulate.layout import (
    INSTANCE_MASK,
    INSTANCE_SHIFT,
    KIND_MASK,
    MICRO_SHIFT,
    PIECES,
    SEVERAL,
    STEP,
    UPDATES,
    WAIT,
)
from penstock.simulate.state import in_state
from penstock.simulate.tournament import ROOT, appoint, finish_acting, next_source

__all__ = ["play_to_the_end"]

BACKWARD, RECOMPUTE = KIND_CODES["B"], KIND_CODES["R"]

LAST = np.int64(1) << 60
"""Added to the rank of reductions, which let messages go first."""


def inputs_left(state, row, word):
    """How many messages (in the third row of a replica: forwards) an action still waits for."""
    return state.inputs[row * state.micro_batches + (word >> MICRO_SHIFT)]


def is_ready(state, replica, kind, word):
    """Whether the inputs of an action have arrived."""
    if kind <= 2 and inputs_left(state, 2 * replica + (kind > 0), word) != 0:
        return False
    if state.streams_each == 1 or kind == 0 or kind == 3:
        return True
    return inputs_left(state, 2 * state.replicas + replica, word) == 0


def start_if_ready(state, stream):
    """Start the next piece of a stream if it is idle and its inputs have arrived."""
    if state.running[stream] or stream == state.ending:
        return
    if state.blocking and state.unsent[stream // state.streams_each] > 0:
        return
    position = state.position[stream]
    if position == state.order_end[stream]:
        return
    word = state.word[position]
    kind = word & KIND_MASK
    if kind >= STEP:
        device = stream // state.streams_each
        if kind == STEP:
            start_step(state, stream, device, position)
            return
        # WAIT and HOLD take no time; a forward follows them.
        while kind > STEP:
            if not is_over(state, stream, device, word):
                return
            position += 1
            state.position[stream] = position
            word = state.word[position]
            kind = word & KIND_MASK
    replica = state.first_replica[((word >> INSTANCE_SHIFT) & INSTANCE_MASK)]
    replica += state.stream_replica[stream]
    segment = state.segment[stream]
    if segment == 0:
        if not is_ready(state, replica, kind, word):
            return
        if state.records_spans:
            state.action_span[2 * (state.span_offset[stream] + position)] = state.now_s
    if word & UPDATES:
        seconds = state.segment_seconds[state.segment_start[replica] + segment]
    else:
        seconds = state.seconds[PIECES * replica + kind]
    claim_s = state.seconds[PIECES * replica + (0 if kind == 0 or kind == RECOMPUTE else BACKWARD)]
    occupy(state, stream, seconds, claim_s)


def is_over(state, stream, device, word):
    """Whether a WAIT or a HOLD is over (see `penstock.simulate.layout`)."""
    number = word >> MICRO_SHIFT
    if word & KIND_MASK == WAIT:
        return state.steps_done[device] >= number
    return state.order_end[stream + 1] - state.position[stream + 1] <= number


def start_step(state, stream, device, position):
    """Start the optimizer step of a device once all its gradients are reduced."""
    if state.buckets_left[device] == 0:
        if state.records_spans:
            state.action_span[2 * (state.span_offset[stream] + position)] = state.now_s
        occupy(state, stream, state.step_seconds[device], state.step_seconds[device])


def end_piece(state, stream):
    """End a piece of work: send its results, then start what can start."""
    position = state.position[stream]
    word = state.word[position]
    kind = word & KIND_MASK
    vacate(state, stream)
    state.ending = stream
    if state.blocking:
        start_waiting(state, state.wires + stream)
    if kind == STEP:
        device = stream // state.streams_each
        state.buckets_left[device] += state.buckets_each[device]
        state.steps_done[device] += 1
        end_word(state, stream, position)
    else:
        replica = state.first_replica[((word >> INSTANCE_SHIFT) & INSTANCE_MASK)]
        end_action(state, stream, position, word, replica + state.stream_replica[stream])
    state.ending = -1
    if state.streams_each == 2:
        start_if_ready(state, stream & ~1)
        start_if_ready(state, stream | 1)
    else:
        start_if_ready(state, stream)


def end_word(state, stream, position):
    """Record the end of an action or a step, and advance to the next one."""
    if state.records_spans:
        state.action_span[2 * (state.span_offset[stream] + position) + 1] = state.now_s
    state.position[stream] = position + 1


def end_action(state, stream, position, word, replica):
    """End an action or a segment of one: send messages and complete buckets."""
    segment, kind = -1, word & KIND_MASK
    if word & UPDATES:
        segment = state.segment[stream]
        state.segment[stream] = segment + 1
    if segment < 0 or segment + 1 == state.segment_count[replica]:
        state.segment[stream] = 0
        end_word(state, stream, position)
        if kind <= 2:
            row = 2 * replica + (kind == 0)
            for lane in range(state.sends_start[row], state.sends_start[row + 1]):
                offer(state, lane, word >> MICRO_SHIFT)
        if kind == 0 and state.streams_each == 2:
            row = 2 * state.replicas + replica
            state.inputs[row * state.micro_batches + (word >> MICRO_SHIFT)] = 0
    if segment >= 0:
        complete_buckets(state, state.first_segment[replica] + segment)


def complete_buckets(state, segment):
    """Offer the buckets whose last gradients came with ``segment``."""
    for k in range(state.completion_start[segment], state.completion_start[segment + 1]):
        bucket = state.completion[k]
        state.members_left[bucket] -= 1
        if state.members_left[bucket] == 0:
            group = state.group_of_bucket[bucket]
            state.members_left[bucket] = state.members_each[group]
            first = state.bucket_start[group]
            size = state.bucket_start[group + 1] - first
            item = state.rounds_done[bucket] * size + bucket - first
            state.rounds_done[bucket] += 1
            offer(state, state.messages + group, item)


def seconds_of_item(state, lane, item):
    """Seconds of a message or a bucket."""
    if lane < state.messages:
        return state.message_seconds[lane]
    group = lane - state.messages
    first = state.bucket_start[group]
    return state.bucket_seconds[first + item % (state.bucket_start[group + 1] - first)]


def record_item(state, lane, item, end_s):
    """Record the span of a message or bucket, if spans are recorded."""
    if state.records_spans:
        span = 2 * (state.item_start[lane] + item)
        state.item_span[span] = state.now_s
        state.item_span[span + 1] = end_s


def can_start(state, lane):
    """Whether all resources of a lane are free."""
    for k in range(state.resource_start[lane], state.resource_start[lane + 1]):
        if state.busy[state.resource[k]] & 1:
            return False
    return True


def set_busy(state, lane, busy):
    """Occupy or free all resources of a lane."""
    if state.blocking & SEVERAL:
        count_talks(state, lane, busy)
        return
    for k in range(state.resource_start[lane], state.resource_start[lane + 1]):
        state.busy[state.resource[k]] = busy


def count_talks(state, lane, busy):
    """`set_busy` where some devices run several transfers at once."""
    for k in range(state.resource_start[lane], state.resource_start[lane + 1]):
        resource = state.resource[k]
        if resource >= state.wires and state.talks_at_once[resource - state.wires]:
            state.busy[resource] += TALKS_TOO if busy else -TALKS_TOO
        else:
            state.busy[resource] = busy


def offer(state, lane, item):
    """A message or bucket is ready: start it, or queue it.

    No queued item can start at this moment: it would have started when its resources became free.
    """
    if seconds_of_item(state, lane, item) == 0.0:
        record_item(state, lane, item, state.now_s)
        arrive(state, lane, item)
        return
    head, tail = state.head[lane], state.tail[lane]
    if head == tail and can_start(state, lane):
        start_transfer(state, lane, item)
        return
    place = state.item_start[lane] + tail
    state.queue[place] = item
    state.queue_sequence[place] = state.waited
    state.tail[lane] = tail + 1
    state.waited += 1
    count_waiting(state, lane, 1)


def count_waiting(state, lane, change):
    """Count the queued items at each resource of a lane, and at its sender."""
    state.waiting += change
    if lane < state.messages and state.blocked_sender[lane] >= 0:
        state.unsent[state.blocked_sender[lane]] += change
    for k in range(state.resource_start[lane], state.resource_start[lane + 1]):
        state.waiting_for[state.resource[k]] += change


def start_transfer(state, lane, item):
    """Occupy the lane's resources with an item, and set when it ends."""
    state.current[lane] = item
    set_busy(state, lane, TALKS)
    end_s = state.now_s + seconds_of_item(state, lane, item)
    record_item(state, lane, item, end_s)
    appoint(state, state.streams + lane, end_s)


def first_waiting(state, lane):
    """Take the first item from a lane's queue."""
    head = state.head[lane]
    state.head[lane] = head + 1
    count_waiting(state, lane, -1)
    return state.queue[state.item_start[lane] + head]


def best_waiting(state, resource, best):
    """The better of ``best`` and the lanes that wait for ``resource`` and can start now."""
    if state.waiting_for[resource] == 0:
        return best
    best_rank = rank_of(state, best) if best >= 0 else 2 * LAST
    for u in range(state.user_start[resource], state.user_start[resource + 1]):
        lane = state.user[u]
        if state.tail[lane] > state.head[lane]:
            rank = rank_of(state, lane)
            if rank < best_rank and can_start(state, lane):
                best, best_rank = lane, rank
    return best


def rank_of(state, lane):
    """The rank of a lane's first item among all that wait: messages first, then by age."""
    rank = state.queue_sequence[state.item_start[lane] + state.head[lane]]
    return rank + LAST if lane >= state.messages else rank


def start_waiting(state, resource):
    """Start what waited for a resource that is free now."""
    while state.waiting > 0:
        following = best_waiting(state, resource, -1)
        if following < 0:
            break
        start_transfer(state, following, first_waiting(state, following))


def end_transfer(state, lane):
    """Free the lane's resources, start what waited for them, deliver the item, resume work."""
    set_busy(state, lane, 0)
    item = state.current[lane]
    first, end = state.resource_start[lane], state.resource_start[lane + 1]
    while state.waiting > 0:
        following = -1
        for k in range(first, end):
            following = best_waiting(state, state.resource[k], following)
        if following < 0:
            break
        start_transfer(state, following, first_waiting(state, following))
    arrive(state, lane, item)
    if state.blocking:
        for k in range(first, end):
            resource = state.resource[k]
            if resource >= state.wires:
                start_if_ready(state, resource - state.wires)


def arrive(state, lane, item):
    """Deliver a message, or the sum of a bucket."""
    if lane < state.messages:
        state.inputs[state.input_row[lane] * state.micro_batches + item] -= 1
        start_if_ready(state, state.receiver[lane])
    else:
        group, each = lane - state.messages, state.streams_each
        for k in range(state.member_start[group], state.member_start[group + 1]):
            member = state.member[k]
            state.buckets_left[member] -= 1
            start_if_ready(state, member * each + each - 1)


def play_to_the_end(array: npt.NDArray[np.int64]) -> float:
    """Play to the end, in place; returns the time of the last event in seconds."""
    state = in_state(array)
    state.acting = state.ending = -1
    for stream in range(state.streams):
        start_if_ready(state, stream)
    while state.next_s[ROOT] < np.inf:
        state.now_s = state.next_s[ROOT]
        source = next_source(state)
        state.acting = source
        state.next_s[state.first_leaf + source] = np.inf
        if source < state.streams:
            end_piece(state, source)
        else:
            end_transfer(state, source - state.streams)
        finish_acting(state)
    return state.now_s


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
