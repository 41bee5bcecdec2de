"""Builds the flat array of `penstock.simulate.layout` from the parts of a plan.

Numbers replicas, devices, messages and reductions as `Workload` does, compiled by numba; a property
test compares the two.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.flat_record import borrowed
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
    Joined,
    count_all,
    number_links,
    stage_table,
)
from penstock.simulate.layout import FIRST_LIST, HEADER, LIST_LENGTHS, PIECES, STEP
from penstock.simulate.state import in_state

__all__ = ["number_through"]


def allocate(header):
    """The array with the counts of ``header``, the starts of all lists, and zeros."""
    length = HEADER
    for k in range(HEADER - FIRST_LIST):
        count, factor, more = LIST_LENGTHS[k]
        header[FIRST_LIST + k] = length
        length += header[count] * factor + more
    array = np.zeros(length, dtype=np.int64)
    for place in range(HEADER):
        array[place] = header[place]
    return array


def fill_replicas(state, joined, table):
    """Write the replicas of every instance and their seconds."""
    segment = replica_segment = 0
    for s in range(state.instances):
        hosts, seconds = table[s, RECORD] + STAGE_HEAD, table[s, REAL_RECORD]
        first, replicas, segments = table[s, FIRST], table[s, REPLICAS], table[s, SEGMENTS]
        state.first_replica[s] = first
        for i in range(replicas):
            replica, device = first + i, table[s, DEVICE] + i
            state.replica_device[replica] = device
            state.device_host[device] = joined.stage[hosts + i]
            state.first_segment[replica] = segment
            state.segment_count[replica] = segments
            state.segment_start[replica] = replica_segment
            state.step_seconds[device] += joined.stage_seconds[seconds + i * PIECES + STEP]
            for k in range(segments):
                at_segment = seconds + replicas * PIECES + i * segments + k
                state.segment_seconds[replica_segment + k] = joined.stage_seconds[at_segment]
            replica_segment += segments
        for k in range(replicas * PIECES):
            state.seconds[first * PIECES + k] = joined.stage_seconds[seconds + k]
        segment += segments


def fill_streams(state, joined, table):
    """Write the orders of every stream; positions are those of words."""
    each, span = state.streams_each, 0
    for k in range(state.words):
        state.word[k] = joined.order_words[k]
    instance_of = np.zeros(state.instances, dtype=np.int64)
    for s in range(state.instances - 1, -1, -1):
        instance_of[joined.groups[s]] = s
    for group in range(joined.device_groups):
        s = instance_of[group]
        for i in range(table[s, REPLICAS]):
            for k in range(each):
                stream = (table[s, DEVICE] + i) * each + k
                order = group * each + k
                start, end = joined.order_start[order], joined.order_start[order + 1]
                state.stream_replica[stream] = i
                state.position[stream] = start
                state.order_end[stream] = end
                state.span_offset[stream] = span - start
                span += end - start


def fill_hosts(state, joined):
    """Write the streams of every host, and each stream's host if that limits compute slots."""
    each = state.streams_each
    for host in range(state.hosts):
        state.host_slots[host] = joined.host_slots[host]
    for stream in range(state.streams):
        host = state.device_host[stream // each]
        state.host_stream_start[host + 1] += 1
        state.shared_host[stream] = host if joined.host_slots[host] > 0 else -1
    cursor = running_sum(state.host_stream_start, state.hosts)
    for stream in range(state.streams):
        host = state.device_host[stream // each]
        state.host_stream[cursor[host]] = stream
        cursor[host] += 1


class Wires(NamedTuple):
    """Resource numbers by device and by host.

    Receive engines of devices (the send engine if half-duplex); incoming ports of hosts (the
    outgoing port if half-duplex); whether each device stops computing while it communicates; where
    its separate links start (-1: none); its index among the devices of its host.
    """

    receive: npt.NDArray[np.int64]
    incoming: npt.NDArray[np.int64]
    blocked: npt.NDArray[np.int64]
    links: npt.NDArray[np.int64]
    inside: npt.NDArray[np.int64]


def number_wires(state, joined, table, links):
    """The numbers of all wires."""
    devices, hosts = state.devices, state.hosts
    receive = np.empty(devices, dtype=np.int64)
    incoming = np.empty(hosts, dtype=np.int64)
    blocked = np.zeros(devices, dtype=np.int64)
    for host in range(hosts):
        incoming[host] = 2 * devices + host + (0 if joined.half_duplex[host] else hosts)
    for device in range(devices):
        half = joined.half_duplex[state.device_host[device]]
        receive[device] = device if half else devices + device
    for s in range(state.instances):
        overlaps = table[s, RECORD] + STAGE_HEAD + table[s, REPLICAS]
        for i in range(table[s, REPLICAS]):
            blocked[table[s, DEVICE] + i] = 1 - joined.stage[overlaps + i]
    first, place, _ = links
    for device in range(devices):
        if first[device] >= 0:
            first[device] += 2 * devices + 2 * hosts
            for k in range(state.streams_each):
                state.talks_at_once[device * state.streams_each + k] = 1
    return Wires(receive, incoming, blocked, first, place)


def block_streams(state, place, device, blocked):
    """Occupy the streams of a device that does not overlap; returns the next free place."""
    each = state.streams_each
    for k in range(each * blocked[device]):
        state.resource[place] = state.wires + device * each + k
        place += 1
    return place


def running_sum(starts, count):
    """Turn the lengths of ``count`` lists into their starts; returns a copy of these as cursors."""
    copy = np.empty(count, dtype=np.int64)
    for k in range(count):
        copy[k] = starts[k]
        starts[k + 1] += starts[k]
    return copy


def fill_messages(state, joined, table, wires):
    """Number the messages, and write the resources and seconds of each."""
    senders = np.empty(state.messages, dtype=np.int64)
    ports = np.empty(state.messages, dtype=np.int64)
    cursor = np.empty(0, dtype=np.int64)
    for counting in (True, False):
        record = seconds = 0
        for k in range(joined.boundaries):
            producer = table[joined.ends[2 * k], FIRST]
            consumer = table[joined.ends[2 * k + 1], FIRST]
            for pair in range(joined.boundary[record]):
                here = record + 1 + PAIR * pair
                i, j = producer + joined.boundary[here], consumer + joined.boundary[here + 1]
                rows = (2 * i + 1, 2 * j)
                for back in range(1 + joined.boundary[here + 2]):
                    row = rows[back]
                    if counting:
                        state.sends_start[row + 1] += 1
                        continue
                    lane = cursor[row]
                    cursor[row] += 1
                    senders[lane], ports[lane] = row >> 1, joined.boundary[here + 3 + back]
                    state.input_row[lane] = 2 * i + 1 if back else 2 * j
                    state.message_seconds[lane] = joined.boundary_seconds[seconds + 2 * pair + back]
            seconds += 2 * joined.boundary[record]
            record += 1 + PAIR * joined.boundary[record]
        if counting:
            cursor = running_sum(state.sends_start, 2 * state.replicas)
    occupy_wires(state, senders, ports, wires)


def occupy_wires(state, senders, ports, wires):
    """Write the resources of all messages (none if it takes no time) and count awaited inputs."""
    each = state.streams_each
    place = 0
    for lane in range(state.messages):
        row = state.input_row[lane]
        for m in range(state.micro_batches):
            state.inputs[row * state.micro_batches + m] += 1
        state.item_start[lane + 1] = (lane + 1) * state.micro_batches
        source = state.replica_device[senders[lane]]
        target = state.replica_device[(row >> 1)]
        state.receiver[lane] = target * each + (row & 1) * (each - 1)
        state.blocked_sender[lane] = source if wires.blocked[source] else -1
        if state.message_seconds[lane] > 0:
            here, there = state.device_host[source], state.device_host[target]
            if wires.links[source] >= 0 and here == there:
                # Half-duplex: one link, the lower-numbered one, serves both directions.
                link = wires.links[source] + wires.inside[target]
                if wires.receive[source] == source:
                    link = min(link, wires.links[target] + wires.inside[source])
                state.resource[place] = link
                place += 1
            else:
                state.resource[place], state.resource[place + 1] = source, wires.receive[target]
                place += 2
            if ports[lane]:
                state.resource[place], state.resource[place + 1] = (
                    2 * state.devices + here,
                    wires.incoming[there],
                )
                place += 2
            place = block_streams(state, place, source, wires.blocked)
            place = block_streams(state, place, target, wires.blocked)
        state.resource_start[lane + 1] = place


def await_own_forwards(state):
    """Let backwards in a stream of their own wait for the forward of the same replica."""
    first = 2 * state.replicas * state.micro_batches
    for k in range(first, state.awaited):
        state.inputs[k] = 1


def count_completions(state, joined, table):
    """Write where each segment's list of completed buckets starts; returns a copy as cursors."""
    for s in range(state.instances):
        first = state.first_segment[table[s, FIRST]]
        buckets = table[s, RECORD] + STAGE_HEAD + 2 * table[s, REPLICAS]
        for k in range(table[s, SEGMENTS]):
            state.completion_start[first + k + 1] = joined.stage[buckets + k]
    record = 0
    for _ in range(joined.ties):
        users, buckets = joined.tie[record], joined.tie[record + 1]
        for k in range(users):
            s = joined.tie[record + TIE_HEAD + k]
            last = state.first_segment[table[s, FIRST]] + table[s, SEGMENTS] - 1
            state.completion_start[last + 1] += buckets
        record += TIE_HEAD + users + joined.tie[record + 2] + joined.tie[record + 3]
    return running_sum(state.completion_start, state.instance_segments)


class Group(NamedTuple):
    """A reduction that is being written. Its buckets are summed once in each round."""

    number: int
    bucket: int
    buckets: int
    rounds: int


def add_buckets(state, group, seconds, first):
    """Start a reduction with its buckets, of ``seconds[first:]``."""
    lane = state.messages + group.number
    state.item_start[lane + 1] = state.item_start[lane] + group.buckets * group.rounds
    state.resource_start[lane + 1] = state.resource_start[lane]
    state.member_start[group.number + 1] = state.member_start[group.number]
    state.bucket_start[group.number + 1] = group.bucket + group.buckets
    for k in range(group.buckets):
        state.bucket_seconds[group.bucket + k] = seconds[first + k]
        state.group_of_bucket[group.bucket + k] = group.number


def add_members(state, table, group, s, works):
    """Add the replicas of instance ``s`` to the newest reduction.

    If it has no work (``works`` is 0), it gives no gradients but still waits for the sum.
    """
    for device in range(table[s, DEVICE], table[s, DEVICE] + table[s, REPLICAS]):
        state.member[state.member_start[group.number + 1]] = device
        state.member_start[group.number + 1] += 1
        state.buckets_left[device] += group.buckets
        state.buckets_each[device] += group.buckets
    if works:
        state.members_each[group.number] += table[s, REPLICAS]
        for k in range(group.bucket, group.bucket + group.buckets):
            state.members_left[k] += table[s, REPLICAS]


def occupy_members(state, group, wires):
    """Let the newest reduction occupy its members' engines, and their streams if they block."""
    lane = state.messages + group.number
    place = state.resource_start[lane + 1]
    members = range(state.member_start[group.number], state.member_start[group.number + 1])
    for k in members:
        device = state.member[k]
        state.resource[place] = device
        place += 1
        if wires.receive[device] != device:
            state.resource[place] = wires.receive[device]
            place += 1
    for k in members:
        place = block_streams(state, place, state.member[k], wires.blocked)
    state.resource_start[lane + 1] = place


def add_ports(state, group, hosts, first, counts, wires):
    """Let the newest reduction occupy the ports of the hosts that ``hosts[first:]`` lists.

    ``counts`` says how many of them are outgoing ports and how many, after these, incoming.
    """
    outgoing, incoming = counts
    lane = state.messages + group.number
    used = state.resource_start[lane + 1]
    for k in range(outgoing):
        state.resource[used + k] = 2 * state.devices + hosts[first + k]
    for k in range(outgoing, outgoing + incoming):
        state.resource[used + k] = wires.incoming[hosts[first + k]]
    state.resource_start[lane + 1] += outgoing + incoming


def add_stage_group(state, joined, table, s, group, cursor, wires):
    """Add the reduction among the replicas of instance ``s``."""
    replicas, segments = table[s, REPLICAS], table[s, SEGMENTS]
    lists = table[s, RECORD] + STAGE_HEAD + 2 * replicas
    seconds = table[s, REAL_RECORD] + replicas * (PIECES + segments)
    add_buckets(state, group, joined.stage_seconds, seconds)
    add_members(state, table, group, s, group.rounds)
    ports = (table[s, OUTGOING], table[s, INCOMING])
    add_ports(state, group, joined.stage, lists + segments, ports, wires)
    occupy_members(state, group, wires)
    first, bucket = state.first_segment[table[s, FIRST]], group.bucket
    for segment in range(segments):
        for _ in range(joined.stage[lists + segment]):
            state.completion[cursor[first + segment]] = bucket
            cursor[first + segment] += 1
            bucket += 1


def add_tie(state, joined, table, record, seconds, group, cursor, wires):
    """Add the reduction of a tie; returns where the next record starts."""
    users, ports = joined.tie[record], (joined.tie[record + 2], joined.tie[record + 3])
    add_buckets(state, group, joined.tie_seconds, seconds)
    for k in range(users):
        s = joined.tie[record + TIE_HEAD + k]
        add_members(state, table, group, s, joined.rounds[s])
        last = state.first_segment[table[s, FIRST]] + table[s, SEGMENTS] - 1
        for bucket in range(group.bucket, group.bucket + group.buckets):
            state.completion[cursor[last]] = bucket
            cursor[last] += 1
    add_ports(state, group, joined.tie, record + TIE_HEAD + users, ports, wires)
    occupy_members(state, group, wires)
    return record + TIE_HEAD + users + ports[0] + ports[1]


def fill_groups(state, joined, table, wires):
    """Number the reductions in the order of their instances, and write them."""
    cursor = count_completions(state, joined, table)
    # `cursor` goes on through all reductions: a segment can complete buckets of several.
    number = bucket = tie = record = seconds = 0
    for s in range(state.instances):
        buckets = table[s, BUCKETS]
        if buckets:
            group = Group(number, bucket, buckets, joined.rounds[s])
            add_stage_group(state, joined, table, s, group, cursor, wires)
            number, bucket = number + 1, bucket + buckets
        while tie < joined.ties and joined.tie[record + TIE_HEAD] == s:
            buckets = joined.tie[record + 1]
            group = Group(number, bucket, buckets, joined.rounds[s])
            record = add_tie(state, joined, table, record, seconds, group, cursor, wires)
            number, bucket, seconds = number + 1, bucket + buckets, seconds + buckets
            tie += 1


def fill_users(state):
    """For each resource, list the lanes that occupy it."""
    used = state.resource_start[state.lanes]
    for k in range(used):
        state.user_start[state.resource[k] + 1] += 1
    cursor = running_sum(state.user_start, state.resources)
    for lane in range(state.lanes):
        for k in range(state.resource_start[lane], state.resource_start[lane + 1]):
            resource = state.resource[k]
            state.user[cursor[resource]] = lane
            cursor[resource] += 1


def number_through(parts: Joined) -> npt.NDArray[np.int64]:
    """The array of a workload before the play starts."""
    joined = borrowed(parts)
    header = np.zeros(HEADER, dtype=np.int64)
    table = stage_table(joined)
    links = number_links(joined, table)
    count_all(in_state(header), joined, table, links)
    array = allocate(header)
    state = in_state(array)
    for place in range(state.places):
        state.next_s[place] = np.inf
    fill_replicas(state, joined, table)
    fill_streams(state, joined, table)
    fill_hosts(state, joined)
    wires = number_wires(state, joined, table, links)
    fill_messages(state, joined, table, wires)
    if state.streams_each > 1:
        await_own_forwards(state)
    fill_groups(state, joined, table, wires)
    fill_users(state)
    return array
