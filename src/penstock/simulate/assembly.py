"""The two flat arrays of `penstock.simulate.layout`, made from the parts of a plan.

Numbers everything through as `Workload` does, compiled by numba; a property test holds the two
together. The parts come as joined records of whole numbers and of seconds:

    stage      replicas, segments, buckets, outgoing ports, incoming ports; hosts; buckets complete
               with each segment; outgoing ports; incoming ports
               seconds of each replica's pieces; of its segments; of the buckets
    boundary   pairs; for each: sender, receiver, returns, port down, port up
               forward and backward seconds of each pair
    tie        stages, buckets, outgoing ports, incoming ports; stages; outgoing; incoming ports
               seconds of the buckets
"""

# numba has no types: its decorator makes every compiled function unknown to a strict checker.
# pyright: basic

from collections.abc import Callable
from typing import TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from penstock.simulate import layout as at
from penstock.simulate.layout import COUNTS, HEADER, LENGTHS, PIECES, REALS

__all__ = ["assemble"]

compiled = numba.njit

# Columns of the table of stages: where the records are, then what their heads say.
RECORD, REAL_RECORD, FIRST, REPLICAS, SEGMENTS, BUCKETS, OUTGOING, INCOMING = range(8)

STAGE_HEAD = 5
PAIR = 5
TIE_HEAD = 4


@compiled
def stage_table(stages, stage_whole):
    """Where each stage's records start, its first device position, and the head of its record."""
    table = np.zeros((stages + 1, 8), dtype=np.int64)
    for s in range(stages):
        record = table[s, RECORD]
        for column in range(REPLICAS, INCOMING + 1):
            table[s, column] = stage_whole[record + column - REPLICAS]
        replicas, segments = table[s, REPLICAS], table[s, SEGMENTS]
        lists = replicas + segments + table[s, OUTGOING] + table[s, INCOMING]
        seconds = replicas * (PIECES + segments) + table[s, BUCKETS]
        table[s + 1, RECORD] = record + STAGE_HEAD + lists
        table[s + 1, REAL_RECORD] = table[s, REAL_RECORD] + seconds
        table[s + 1, FIRST] = table[s, FIRST] + replicas
    return table


@compiled
def count_ties(w, table, tie_whole):
    """Count the buckets and occupations of parameters tied across stages."""
    record = 0
    while record < len(tie_whole):
        users, buckets = tie_whole[record], tie_whole[record + 1]
        ports = tie_whole[record + 2] + tie_whole[record + 3]
        w[at.GROUPS] += 1
        w[at.BUCKETS] += buckets
        w[at.COMPLETIONS] += users * buckets
        w[at.OCCUPATIONS] += ports
        for k in range(users):
            replicas = table[tie_whole[record + TIE_HEAD + k], REPLICAS]
            w[at.MEMBERS] += replicas
            w[at.OCCUPATIONS] += 2 * replicas
        record += TIE_HEAD + users + ports


@compiled
def count_messages(w, boundary_whole):
    """Count the messages of all boundaries, and what they may occupy."""
    record = 0
    while record < len(boundary_whole):
        pairs = boundary_whole[record]
        for k in range(pairs):
            w[at.MESSAGES] += 1 + boundary_whole[record + 1 + PAIR * k + 2]
        record += 1 + PAIR * pairs
    w[at.OCCUPATIONS] += 4 * w[at.MESSAGES]


@compiled
def count_all(w, table, boundary_whole, tie_whole, order_start, record):
    """Fill in the counts of the header; those of stages, hosts and micro-batches stand already."""
    for s in range(w[at.STAGES]):
        replicas, segments = table[s, REPLICAS], table[s, SEGMENTS]
        w[at.STAGE_SEGMENTS] += segments
        w[at.DEVICE_SEGMENTS] += replicas * segments
        w[at.ACTION_SPANS] += record * replicas * (order_start[s + 1] - order_start[s])
        if table[s, BUCKETS]:
            w[at.GROUPS] += 1
            w[at.BUCKETS] += table[s, BUCKETS]
            w[at.COMPLETIONS] += table[s, BUCKETS]
            w[at.MEMBERS] += replicas
            w[at.OCCUPATIONS] += 2 * replicas + table[s, OUTGOING] + table[s, INCOMING]
    count_ties(w, table, tie_whole)
    count_messages(w, boundary_whole)
    w[at.DEVICES] = table[-1, FIRST]
    w[at.LANES] = w[at.MESSAGES] + w[at.GROUPS]
    w[at.ITEMS] = w[at.MESSAGES] * w[at.MICRO_BATCHES] + w[at.BUCKETS]
    w[at.RESOURCES] = 2 * w[at.DEVICES] + 2 * w[at.HOSTS]
    w[at.ORDERED_ACTIONS] = order_start[-1]
    w[at.AWAITED] = 2 * w[at.DEVICES] * w[at.MICRO_BATCHES]
    w[at.SPANS] = record * w[at.DEVICES]
    w[at.ITEM_SPANS] = record * w[at.ITEMS]
    w[at.LEAVES] = 1
    while w[at.LEAVES] < w[at.DEVICES] + w[at.LANES]:
        w[at.LEAVES] *= 2


@compiled
def allocate(header):
    """Both arrays, with the counts and starts of ``header`` and nothing happened yet."""
    whole, real = HEADER, 1
    for field in range(COUNTS, HEADER):
        count, factor, more = LENGTHS[field - COUNTS]
        length = header[count] * factor + more
        if field < REALS:
            header[field] = whole
            whole += length
        else:
            header[field] = real
            real += length
    w, x = np.empty(whole, dtype=np.int64), np.empty(real)
    w[:HEADER] = header
    w[HEADER : w[at.QUEUE]] = 0
    x[:] = 0.0
    x[w[at.NEXT] : w[at.NEXT] + 2 * w[at.LEAVES]] = np.inf
    return w, x


@compiled
def fill_stages(w, x, table, stage_whole, stage_real, order_start, last_backward):
    """Write down the devices of every stage, their orders and their seconds."""
    segment = device_segment = span = 0
    for s in range(w[at.STAGES]):
        record, seconds = table[s, RECORD] + STAGE_HEAD, table[s, REAL_RECORD]
        first, replicas, segments = table[s, FIRST], table[s, REPLICAS], table[s, SEGMENTS]
        for i in range(replicas):
            device = first + i
            w[w[at.HOST] + device] = stage_whole[record + i]
            w[w[at.POSITION] + device] = order_start[s]
            w[w[at.ORDER_END] + device] = order_start[s + 1]
            w[w[at.LAST_BACKWARD] + device] = order_start[s] + last_backward[s]
            w[w[at.SPAN_OFFSET] + device] = span - order_start[s]
            w[w[at.FIRST_SEGMENT] + device] = segment
            w[w[at.SEGMENT_COUNT] + device] = segments
            w[w[at.SEGMENT_START] + device] = w[at.SEGMENT_SECONDS] + device_segment
            span += order_start[s + 1] - order_start[s]
            for k in range(segments):
                at_segment = seconds + replicas * PIECES + i * segments + k
                x[w[at.SEGMENT_SECONDS] + device_segment + k] = stage_real[at_segment]
            device_segment += segments
        for k in range(replicas * PIECES):
            x[w[at.SECONDS] + first * PIECES + k] = stage_real[seconds + k]
        segment += segments


@compiled
def fill_hosts(w, host_slots):
    """Write down the devices of every host; those that share too few slots know it."""
    start = w[at.HOST_DEVICE_START]
    for host in range(w[at.HOSTS]):
        w[w[at.HOST_SLOTS] + host] = host_slots[host]
    for device in range(w[at.DEVICES]):
        host = w[w[at.HOST] + device]
        w[start + host + 1] += 1
        w[w[at.SHARED_HOST] + device] = host if host_slots[host] > 0 else -1
    cursor = running_sum(w, start, w[at.HOSTS])
    for device in range(w[at.DEVICES]):
        host = w[w[at.HOST] + device]
        w[w[at.HOST_DEVICE] + cursor[host]] = device
        cursor[host] += 1


@compiled
def running_sum(w, start, count):
    """Turn the lengths of ``count`` lists into where they start; a copy of these to fill them."""
    for k in range(count):
        w[start + k + 1] += w[start + k]
    return w[start : start + count].copy()


@compiled
def fill_messages(w, x, table, ends, boundary_whole, boundary_real):
    """Number the messages, write down what each occupies and its seconds."""
    senders = np.empty(w[at.MESSAGES], dtype=np.int64)
    ports = np.empty(w[at.MESSAGES], dtype=np.int64)
    cursor = np.empty(0, dtype=np.int64)
    for counting in (True, False):
        record = seconds = 0
        for k in range(len(ends) // 2):
            producer, consumer = table[ends[2 * k], FIRST], table[ends[2 * k + 1], FIRST]
            for pair in range(boundary_whole[record]):
                here = record + 1 + PAIR * pair
                i, j = producer + boundary_whole[here], consumer + boundary_whole[here + 1]
                rows = (2 * i + 1, 2 * j)
                for back in range(1 + boundary_whole[here + 2]):
                    row = rows[back]
                    if counting:
                        w[w[at.SENDS_START] + row + 1] += 1
                        continue
                    lane = cursor[row]
                    cursor[row] += 1
                    senders[lane], ports[lane] = row >> 1, boundary_whole[here + 3 + back]
                    w[w[at.INPUT_ROW] + lane] = 2 * i + 1 if back else 2 * j
                    x[w[at.MESSAGE_SECONDS] + lane] = boundary_real[seconds + 2 * pair + back]
            seconds += 2 * boundary_whole[record]
            record += 1 + PAIR * boundary_whole[record]
        if counting:
            cursor = running_sum(w, w[at.SENDS_START], 2 * w[at.DEVICES])
    occupy_wires(w, x, senders, ports)


@compiled
def occupy_wires(w, x, senders, ports):
    """Engines and ports of all messages; one of no seconds occupies nothing. Inputs to come."""
    count, used = w[at.DEVICES], 0
    for lane in range(w[at.MESSAGES]):
        row = w[w[at.INPUT_ROW] + lane]
        for m in range(w[at.MICRO_BATCHES]):
            w[w[at.INPUTS] + row * w[at.MICRO_BATCHES] + m] += 1
        w[w[at.ITEM_START] + lane + 1] = (lane + 1) * w[at.MICRO_BATCHES]
        if x[w[at.MESSAGE_SECONDS] + lane] > 0:
            first = w[at.RESOURCE] + used
            w[first], w[first + 1] = senders[lane], count + (row >> 1)
            used += 2
            if ports[lane]:
                w[first + 2] = 2 * count + w[w[at.HOST] + senders[lane]]
                w[first + 3] = 2 * count + w[at.HOSTS] + w[w[at.HOST] + (row >> 1)]
                used += 2
        w[w[at.RESOURCE_START] + lane + 1] = used


@compiled
def count_completions(w, table, stage_whole, tie_whole):
    """Where the buckets that each segment completes are listed; a copy to list them."""
    start = w[at.COMPLETION_START] + 1
    for s in range(w[at.STAGES]):
        first = w[w[at.FIRST_SEGMENT] + table[s, FIRST]]
        buckets = table[s, RECORD] + STAGE_HEAD + table[s, REPLICAS]
        for k in range(table[s, SEGMENTS]):
            w[start + first + k] = stage_whole[buckets + k]
    record = 0
    while record < len(tie_whole):
        users, buckets = tie_whole[record], tie_whole[record + 1]
        for k in range(users):
            s = tie_whole[record + TIE_HEAD + k]
            last = w[w[at.FIRST_SEGMENT] + table[s, FIRST]] + table[s, SEGMENTS] - 1
            w[start + last] += buckets
        record += TIE_HEAD + users + tie_whole[record + 2] + tie_whole[record + 3]
    return running_sum(w, start - 1, w[at.STAGE_SEGMENTS])


@compiled
def add_buckets(w, x, group, bucket, buckets, seconds, first):
    """Open a group with the buckets from ``bucket`` on; ``seconds[first:]`` are theirs."""
    lane = w[at.MESSAGES] + group
    w[w[at.ITEM_START] + lane + 1] = w[w[at.ITEM_START] + lane] + buckets
    w[w[at.RESOURCE_START] + lane + 1] = w[w[at.RESOURCE_START] + lane]
    w[w[at.MEMBER_START] + group + 1] = w[w[at.MEMBER_START] + group]
    for k in range(buckets):
        x[w[at.BUCKET_SECONDS] + bucket + k] = seconds[first + k]
        w[w[at.GROUP_OF_BUCKET] + bucket + k] = group


@compiled
def add_members(w, group, bucket, buckets, first, replicas):
    """Let the replicas from position ``first`` on take part in the newest group."""
    lane = w[at.MESSAGES] + group
    for device in range(first, first + replicas):
        w[w[at.MEMBER] + w[w[at.MEMBER_START] + group + 1]] = device
        w[w[at.MEMBER_START] + group + 1] += 1
        w[w[at.BUCKETS_LEFT] + device] += buckets
        used = w[at.RESOURCE] + w[w[at.RESOURCE_START] + lane + 1]
        w[used], w[used + 1] = device, w[at.DEVICES] + device
        w[w[at.RESOURCE_START] + lane + 1] += 2
    for k in range(bucket, bucket + buckets):
        w[w[at.MEMBERS_LEFT] + k] += replicas


@compiled
def add_ports(w, group, hosts, first, outgoing, incoming):
    """Let the newest group pass the ports of the hosts that ``hosts[first:]`` lists."""
    lane = w[at.MESSAGES] + group
    used = w[at.RESOURCE] + w[w[at.RESOURCE_START] + lane + 1]
    ports = 2 * w[at.DEVICES]
    for k in range(outgoing + incoming):
        w[used + k] = ports + hosts[first + k] + (w[at.HOSTS] if k >= outgoing else 0)
    w[w[at.RESOURCE_START] + lane + 1] += outgoing + incoming


@compiled
def add_stage_group(w, x, table, s, group, bucket, stage_whole, stage_real, cursor):
    """The reduction among the replicas of stage ``s``."""
    replicas, segments, buckets = table[s, REPLICAS], table[s, SEGMENTS], table[s, BUCKETS]
    lists = table[s, RECORD] + STAGE_HEAD + replicas
    seconds = table[s, REAL_RECORD] + replicas * (PIECES + segments)
    add_buckets(w, x, group, bucket, buckets, stage_real, seconds)
    add_members(w, group, bucket, buckets, table[s, FIRST], replicas)
    add_ports(w, group, stage_whole, lists + segments, table[s, OUTGOING], table[s, INCOMING])
    first = w[w[at.FIRST_SEGMENT] + table[s, FIRST]]
    for segment in range(segments):
        for _ in range(stage_whole[lists + segment]):
            w[w[at.COMPLETION] + cursor[first + segment]] = bucket
            cursor[first + segment] += 1
            bucket += 1


@compiled
def add_tie(w, x, table, group, bucket, tie_whole, record, tie_real, seconds, cursor):
    """The reduction of parameters tied across stages; where the next record starts."""
    users, buckets = tie_whole[record], tie_whole[record + 1]
    outgoing, incoming = tie_whole[record + 2], tie_whole[record + 3]
    add_buckets(w, x, group, bucket, buckets, tie_real, seconds)
    for k in range(users):
        s = tie_whole[record + TIE_HEAD + k]
        add_members(w, group, bucket, buckets, table[s, FIRST], table[s, REPLICAS])
        last = w[w[at.FIRST_SEGMENT] + table[s, FIRST]] + table[s, SEGMENTS] - 1
        for b in range(bucket, bucket + buckets):
            w[w[at.COMPLETION] + cursor[last]] = b
            cursor[last] += 1
    add_ports(w, group, tie_whole, record + TIE_HEAD + users, outgoing, incoming)
    return record + TIE_HEAD + users + outgoing + incoming


@compiled
def fill_groups(w, x, table, stage_whole, stage_real, tie_whole, tie_real):
    """Number the reductions by their stages, and write down all about them."""
    cursor = count_completions(w, table, stage_whole, tie_whole)
    # Every bucket counts its members anew, group after group.
    group = bucket = record = seconds = 0
    for s in range(w[at.STAGES]):
        if table[s, BUCKETS]:
            add_stage_group(w, x, table, s, group, bucket, stage_whole, stage_real, cursor)
            group, bucket = group + 1, bucket + table[s, BUCKETS]
        while record < len(tie_whole) and tie_whole[record + TIE_HEAD] == s:
            buckets = tie_whole[record + 1]
            record = add_tie(
                w, x, table, group, bucket, tie_whole, record, tie_real, seconds, cursor
            )
            group, bucket, seconds = group + 1, bucket + buckets, seconds + buckets


@compiled
def fill_users(w):
    """For each resource the lanes that occupy it."""
    start, used = w[at.USER_START], w[w[at.RESOURCE_START] + w[at.LANES]]
    for k in range(used):
        w[start + w[w[at.RESOURCE] + k] + 1] += 1
    cursor = running_sum(w, start, w[at.RESOURCES])
    for lane in range(w[at.LANES]):
        for k in range(w[w[at.RESOURCE_START] + lane], w[w[at.RESOURCE_START] + lane + 1]):
            resource = w[w[at.RESOURCE] + k]
            w[w[at.USER] + cursor[resource]] = lane
            cursor[resource] += 1


def number_through(
    micro_batches,
    record,
    host_slots,
    orders,
    stage_whole,
    stage_real,
    ends,
    boundary_whole,
    boundary_real,
    tie_whole,
    tie_real,
):
    """The arrays of one iteration; ``record`` (0 or 1) leaves room for spans.

    ``orders`` are start, kind, micro-batch and last backward of `FlatOrders`; ``ends`` the
    producer and consumer stage of every boundary.
    """
    order_start, order_kind, order_micro, last_backward = orders
    header = np.zeros(HEADER, dtype=np.int64)
    header[at.STAGES] = len(order_start) - 1
    header[at.HOSTS] = len(host_slots)
    header[at.MICRO_BATCHES] = micro_batches
    table = stage_table(header[at.STAGES], stage_whole)
    count_all(header, table, boundary_whole, tie_whole, order_start, record)
    w, x = allocate(header)
    w[w[at.ORDER_KIND] : w[at.ORDER_KIND] + w[at.ORDERED_ACTIONS]] = order_kind
    w[w[at.ORDER_MICRO] : w[at.ORDER_MICRO] + w[at.ORDERED_ACTIONS]] = order_micro
    fill_stages(w, x, table, stage_whole, stage_real, order_start, last_backward)
    fill_hosts(w, host_slots)
    fill_messages(w, x, table, ends, boundary_whole, boundary_real)
    fill_groups(w, x, table, stage_whole, stage_real, tie_whole, tie_real)
    fill_users(w)
    return w, x


Made: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
assemble: Callable[..., Made] = numba.njit(cache=True)(number_through)
"""`number_through`, compiled; kept on disk, so that only the first call ever compiles it."""
