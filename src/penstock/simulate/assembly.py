"""Builds the two flat arrays of `penstock.simulate.layout` from the parts of a plan.

Numbers replicas, devices, messages and reductions as `Workload` does, compiled by numba; a property
test compares the two. The parts come as concatenated records of integers and of seconds:

    stage      replicas, segments, buckets, outgoing ports, incoming ports; hosts; whether each
               replica's device overlaps; buckets complete with each segment; outgoing ports;
               incoming ports
               seconds of each replica's pieces; of its segments; of the buckets
    boundary   pairs; for each: sender, receiver, returns, port down, port up
               forward and backward seconds of each pair
    tie        stages, buckets, outgoing ports, incoming ports; stages; outgoing; incoming ports
               seconds of the buckets
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.borrowed import borrowed
from penstock.kernels import copy_into
from penstock.simulate import layout as at
from penstock.simulate.assembly_tables import (
    BUCKETS,
    DEVICE,
    FIRST,
    INCOMING,
    OUTGOING,
    PAIR,
    REAL_RECORD,
    RECORD,
    REPLICAS,
    SEGMENTS,
    STAGE_HEAD,
    TIE_HEAD,
    count_all,
    last_of,
    number_links,
    stage_table,
)
from penstock.simulate.layout import COUNTS, HEADER, LENGTHS, PIECES, REALS, STEP

Whole: TypeAlias = npt.NDArray[np.int64]
Real: TypeAlias = npt.NDArray[np.float64]

__all__ = ["number_through"]


def allocate(header):
    """Both arrays, with the counts and starts of ``header`` and the state before the play."""
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
    w, x = np.zeros(whole, dtype=np.int64), np.zeros(real)
    copy_into(w, header)
    for place in range(w[at.NEXT], w[at.NEXT] + w[at.PLACES]):
        x[place] = np.inf
    return w, x


def fill_replicas(w, x, table, stage_whole, stage_real):
    """Write the replicas of every instance and their seconds."""
    segment = replica_segment = 0
    for s in range(w[at.INSTANCES]):
        hosts, seconds = table[s, RECORD] + STAGE_HEAD, table[s, REAL_RECORD]
        first, replicas, segments = table[s, FIRST], table[s, REPLICAS], table[s, SEGMENTS]
        w[w[at.FIRST_REPLICA] + s] = first
        for i in range(replicas):
            replica, device = first + i, table[s, DEVICE] + i
            w[w[at.REPLICA_DEVICE] + replica] = device
            w[w[at.DEVICE_HOST] + device] = stage_whole[hosts + i]
            w[w[at.FIRST_SEGMENT] + replica] = segment
            w[w[at.SEGMENT_COUNT] + replica] = segments
            w[w[at.SEGMENT_START] + replica] = w[at.SEGMENT_SECONDS] + replica_segment
            x[w[at.STEP_SECONDS] + device] += stage_real[seconds + i * PIECES + STEP]
            for k in range(segments):
                at_segment = seconds + replicas * PIECES + i * segments + k
                x[w[at.SEGMENT_SECONDS] + replica_segment + k] = stage_real[at_segment]
            replica_segment += segments
        for k in range(replicas * PIECES):
            x[w[at.SECONDS] + first * PIECES + k] = stage_real[seconds + k]
        segment += segments


def fill_streams(w, table, groups, order_start, order_words):
    """Write the orders of every stream; positions are those of words in the whole array."""
    each, span = w[at.STREAMS_EACH], 0
    for k in range(w[at.WORDS]):
        w[w[at.WORD] + k] = order_words[k]
    instance_of = np.zeros(w[at.INSTANCES], dtype=np.int64)
    for s in range(w[at.INSTANCES] - 1, -1, -1):
        instance_of[groups[s]] = s
    for group in range(last_of(groups) + 1):
        s = instance_of[group]
        for i in range(table[s, REPLICAS]):
            for k in range(each):
                stream = (table[s, DEVICE] + i) * each + k
                start, end = order_start[group * each + k], order_start[group * each + k + 1]
                w[w[at.STREAM_REPLICA] + stream] = i
                w[w[at.POSITION] + stream] = w[at.WORD] + start
                w[w[at.ORDER_END] + stream] = w[at.WORD] + end
                w[w[at.SPAN_OFFSET] + stream] = span - start - w[at.WORD]
                span += end - start


def fill_hosts(w, host_slots):
    """Write the streams of every host, and each stream's host if that limits compute slots."""
    start, each = w[at.HOST_STREAM_START], w[at.STREAMS_EACH]
    for host in range(w[at.HOSTS]):
        w[w[at.HOST_SLOTS] + host] = host_slots[host]
    for stream in range(w[at.STREAMS]):
        host = w[w[at.DEVICE_HOST] + stream // each]
        w[start + host + 1] += 1
        w[w[at.SHARED_HOST] + stream] = host if host_slots[host] > 0 else -1
    cursor = running_sum(w, start, w[at.HOSTS])
    for stream in range(w[at.STREAMS]):
        host = w[w[at.DEVICE_HOST] + stream // each]
        w[w[at.HOST_STREAM] + cursor[host]] = stream
        cursor[host] += 1


def number_wires(w, table, stage_whole, half_duplex, links):
    """Resource numbers by device and host, as a tuple of five arrays.

    Receive engines of devices (the send engine if half-duplex); incoming ports of hosts (the
    outgoing port if half-duplex); whether each device stops computing while it communicates; where
    its separate links start (-1: none); its index among the devices of its host.
    """
    devices, hosts = w[at.DEVICES], w[at.HOSTS]
    receive = np.empty(devices, dtype=np.int64)
    incoming = np.empty(hosts, dtype=np.int64)
    blocked = np.zeros(devices, dtype=np.int64)
    for host in range(hosts):
        incoming[host] = 2 * devices + host + (0 if half_duplex[host] else hosts)
    for device in range(devices):
        half = half_duplex[w[w[at.DEVICE_HOST] + device]]
        receive[device] = device if half else devices + device
    for s in range(w[at.INSTANCES]):
        overlaps = table[s, RECORD] + STAGE_HEAD + table[s, REPLICAS]
        for i in range(table[s, REPLICAS]):
            blocked[table[s, DEVICE] + i] = 1 - stage_whole[overlaps + i]
    first, place, _ = links
    for device in range(devices):
        if first[device] >= 0:
            first[device] += 2 * devices + 2 * hosts
            for k in range(w[at.STREAMS_EACH]):
                w[w[at.TALKS_AT_ONCE] + device * w[at.STREAMS_EACH] + k] = 1
    return receive, incoming, blocked, first, place


def block_streams(w, place, device, blocked):
    """Occupy the streams of a device that does not overlap; returns the next free place."""
    each = w[at.STREAMS_EACH]
    for k in range(each * blocked[device]):
        w[place] = w[at.WIRES] + device * each + k
        place += 1
    return place


def running_sum(w, start, count):
    """Turn the lengths of ``count`` lists into their starts; returns a copy of these as cursors."""
    for k in range(count):
        w[start + k + 1] += w[start + k]
    starts = np.empty(count, dtype=np.int64)
    for k in range(count):
        starts[k] = w[start + k]
    return starts


def fill_messages(w, x, table, ends, boundary_whole, boundary_real, wires):
    """Number the messages, and write the resources and seconds of each."""
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
            cursor = running_sum(w, w[at.SENDS_START], 2 * w[at.REPLICAS])
    occupy_wires(w, x, senders, ports, wires)


def occupy_wires(w, x, senders, ports, wires):
    """Write the resources of all messages (none if it takes no time) and count awaited inputs."""
    (receive, incoming, blocked, links, inside), each = wires, w[at.STREAMS_EACH]
    place = w[at.RESOURCE]
    for lane in range(w[at.MESSAGES]):
        row = w[w[at.INPUT_ROW] + lane]
        for m in range(w[at.MICRO_BATCHES]):
            w[w[at.INPUTS] + row * w[at.MICRO_BATCHES] + m] += 1
        w[w[at.ITEM_START] + lane + 1] = (lane + 1) * w[at.MICRO_BATCHES]
        source = w[w[at.REPLICA_DEVICE] + senders[lane]]
        target = w[w[at.REPLICA_DEVICE] + (row >> 1)]
        w[w[at.RECEIVER] + lane] = target * each + (row & 1) * (each - 1)
        w[w[at.BLOCKED_SENDER] + lane] = source if blocked[source] else -1
        if x[w[at.MESSAGE_SECONDS] + lane] > 0:
            here, there = w[w[at.DEVICE_HOST] + source], w[w[at.DEVICE_HOST] + target]
            if links[source] >= 0 and here == there:
                # Half-duplex: one link, the lower-numbered one, serves both directions.
                w[place] = links[source] + inside[target]
                if receive[source] == source:
                    w[place] = min(w[place], links[target] + inside[source])
                place += 1
            else:
                w[place], w[place + 1] = source, receive[target]
                place += 2
            if ports[lane]:
                w[place], w[place + 1] = 2 * w[at.DEVICES] + here, incoming[there]
                place += 2
            place = block_streams(w, place, source, blocked)
            place = block_streams(w, place, target, blocked)
        w[w[at.RESOURCE_START] + lane + 1] = place - w[at.RESOURCE]


def await_own_forwards(w):
    """Let backwards in a stream of their own wait for the forward of the same replica."""
    first = 2 * w[at.REPLICAS] * w[at.MICRO_BATCHES]
    for k in range(first, w[at.AWAITED]):
        w[w[at.INPUTS] + k] = 1


def count_completions(w, table, stage_whole, tie_whole):
    """Write where each segment's list of completed buckets starts; returns a copy as cursors."""
    start = w[at.COMPLETION_START] + 1
    for s in range(w[at.INSTANCES]):
        first = w[w[at.FIRST_SEGMENT] + table[s, FIRST]]
        buckets = table[s, RECORD] + STAGE_HEAD + 2 * table[s, REPLICAS]
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
    return running_sum(w, start - 1, w[at.INSTANCE_SEGMENTS])


def add_buckets(w, x, group, bucket, buckets, rounds, seconds, first):
    """Start a reduction with the buckets from ``bucket`` on, of ``seconds[first:]``."""
    lane = w[at.MESSAGES] + group
    w[w[at.ITEM_START] + lane + 1] = w[w[at.ITEM_START] + lane] + buckets * rounds
    w[w[at.RESOURCE_START] + lane + 1] = w[w[at.RESOURCE_START] + lane]
    w[w[at.MEMBER_START] + group + 1] = w[w[at.MEMBER_START] + group]
    w[w[at.BUCKET_START] + group + 1] = bucket + buckets
    for k in range(buckets):
        x[w[at.BUCKET_SECONDS] + bucket + k] = seconds[first + k]
        w[w[at.GROUP_OF_BUCKET] + bucket + k] = group


def add_members(w, table, group, bucket, buckets, s, works):
    """Add the replicas of instance ``s`` to the newest reduction.

    If it has no work (``works`` is 0), it gives no gradients but still waits for the sum.
    """
    for device in range(table[s, DEVICE], table[s, DEVICE] + table[s, REPLICAS]):
        w[w[at.MEMBER] + w[w[at.MEMBER_START] + group + 1]] = device
        w[w[at.MEMBER_START] + group + 1] += 1
        w[w[at.BUCKETS_LEFT] + device] += buckets
        w[w[at.BUCKETS_EACH] + device] += buckets
    if works:
        w[w[at.MEMBERS_EACH] + group] += table[s, REPLICAS]
        for k in range(bucket, bucket + buckets):
            w[w[at.MEMBERS_LEFT] + k] += table[s, REPLICAS]


def occupy_members(w, group, wires):
    """Let the newest reduction occupy its members' engines, and their streams if they block."""
    receive, _, blocked, _, _ = wires
    lane = w[at.MESSAGES] + group
    first = w[at.RESOURCE] + w[w[at.RESOURCE_START] + lane + 1]
    place = first
    members = range(w[w[at.MEMBER_START] + group], w[w[at.MEMBER_START] + group + 1])
    for k in members:
        device = w[w[at.MEMBER] + k]
        w[place] = device
        place += 1
        if receive[device] != device:
            w[place] = receive[device]
            place += 1
    for k in members:
        place = block_streams(w, place, w[w[at.MEMBER] + k], blocked)
    w[w[at.RESOURCE_START] + lane + 1] += place - first


def add_ports(w, group, hosts, first, outgoing, incoming, wires):
    """Let the newest reduction occupy the ports of the hosts that ``hosts[first:]`` lists."""
    incoming_of = wires[1]
    lane = w[at.MESSAGES] + group
    used = w[at.RESOURCE] + w[w[at.RESOURCE_START] + lane + 1]
    for k in range(outgoing):
        w[used + k] = 2 * w[at.DEVICES] + hosts[first + k]
    for k in range(outgoing, outgoing + incoming):
        w[used + k] = incoming_of[hosts[first + k]]
    w[w[at.RESOURCE_START] + lane + 1] += outgoing + incoming


def add_stage_group(w, x, table, s, group, bucket, rounds, stage_whole, stage_real, cursor, wires):
    """Add the reduction among the replicas of instance ``s``."""
    replicas, segments, buckets = table[s, REPLICAS], table[s, SEGMENTS], table[s, BUCKETS]
    lists = table[s, RECORD] + STAGE_HEAD + 2 * replicas
    seconds = table[s, REAL_RECORD] + replicas * (PIECES + segments)
    add_buckets(w, x, group, bucket, buckets, rounds[s], stage_real, seconds)
    add_members(w, table, group, bucket, buckets, s, rounds[s])
    outgoing, incoming = table[s, OUTGOING], table[s, INCOMING]
    add_ports(w, group, stage_whole, lists + segments, outgoing, incoming, wires)
    occupy_members(w, group, wires)
    first = w[w[at.FIRST_SEGMENT] + table[s, FIRST]]
    for segment in range(segments):
        for _ in range(stage_whole[lists + segment]):
            w[w[at.COMPLETION] + cursor[first + segment]] = bucket
            cursor[first + segment] += 1
            bucket += 1


def add_tie(
    w, x, table, group, bucket, rounds, tie_whole, record, tie_real, seconds, cursor, wires
):
    """Add the reduction of a tie; returns where the next record starts."""
    users, buckets = tie_whole[record], tie_whole[record + 1]
    outgoing, incoming = tie_whole[record + 2], tie_whole[record + 3]
    add_buckets(
        w, x, group, bucket, buckets, rounds[tie_whole[record + TIE_HEAD]], tie_real, seconds
    )
    for k in range(users):
        s = tie_whole[record + TIE_HEAD + k]
        add_members(w, table, group, bucket, buckets, s, rounds[s])
        last = w[w[at.FIRST_SEGMENT] + table[s, FIRST]] + table[s, SEGMENTS] - 1
        for b in range(bucket, bucket + buckets):
            w[w[at.COMPLETION] + cursor[last]] = b
            cursor[last] += 1
    add_ports(w, group, tie_whole, record + TIE_HEAD + users, outgoing, incoming, wires)
    occupy_members(w, group, wires)
    return record + TIE_HEAD + users + outgoing + incoming


def fill_groups(w, x, table, rounds, stage_whole, stage_real, tie_whole, tie_real, wires):
    """Number the reductions in the order of their instances, and write them."""
    cursor = count_completions(w, table, stage_whole, tie_whole)
    # `cursor` goes on through all reductions: a segment can complete buckets of several.
    group = bucket = record = seconds = 0
    for s in range(w[at.INSTANCES]):
        if table[s, BUCKETS]:
            add_stage_group(
                w, x, table, s, group, bucket, rounds, stage_whole, stage_real, cursor, wires
            )
            group, bucket = group + 1, bucket + table[s, BUCKETS]
        while record < len(tie_whole) and tie_whole[record + TIE_HEAD] == s:
            buckets = tie_whole[record + 1]
            record = add_tie(
                w,
                x,
                table,
                group,
                bucket,
                rounds,
                tie_whole,
                record,
                tie_real,
                seconds,
                cursor,
                wires,
            )
            group, bucket, seconds = group + 1, bucket + buckets, seconds + buckets


def fill_users(w):
    """For each resource, list the lanes that occupy it."""
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
    micro_batches: int,
    record: int,
    streams_each: int,
    host_slots: Whole,
    half_duplex: Whole,
    separate_links: Whole,
    orders: tuple[Whole, Whole],
    groups: Whole,
    rounds: Whole,
    stage_whole: Whole,
    stage_real: Real,
    ends: Whole,
    boundary_whole: Whole,
    boundary_real: Real,
    tie_whole: Whole,
    tie_real: Real,
) -> tuple[Whole, Real]:
    """The arrays of a workload; ``record`` (0 or 1) makes space for spans.

    ``orders`` are the starts and words of `FlatOrders`. ``groups`` and ``rounds`` are those of
    `Instances`, the latter for all iterations. ``ends`` lists the producer and the consumer
    instance of every boundary.
    """
    order_start, order_words = orders
    header = np.zeros(HEADER, dtype=np.int64)
    header[at.INSTANCES] = len(groups)
    header[at.HOSTS] = len(host_slots)
    header[at.MICRO_BATCHES] = micro_batches
    header[at.STREAMS_EACH] = streams_each
    table = stage_table(groups, stage_whole)
    links = number_links(table, groups, stage_whole, separate_links)
    count_all(
        header,
        table,
        stage_whole,
        boundary_whole,
        tie_whole,
        order_start,
        rounds,
        groups,
        links,
        record,
    )
    whole, real = allocate(header)
    w, x = borrowed(whole), borrowed(real)
    fill_replicas(w, x, table, stage_whole, stage_real)
    fill_streams(w, table, groups, order_start, order_words)
    fill_hosts(w, host_slots)
    wires = number_wires(w, table, stage_whole, half_duplex, links)
    fill_messages(w, x, table, ends, boundary_whole, boundary_real, wires)
    if streams_each > 1:
        await_own_forwards(w)
    fill_groups(w, x, table, rounds, stage_whole, stage_real, tie_whole, tie_real, wires)
    fill_users(w)
    return whole, real
