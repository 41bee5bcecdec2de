"""Counts that give the lengths of a workload's lists, and positions of records in the input.

Compiled by numba, for `penstock.simulate.assembly`.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.simulate.layout import PIECES, SEVERAL, STANDS_STILL

Whole: TypeAlias = npt.NDArray[np.int64]
Real: TypeAlias = npt.NDArray[np.float64]

__all__ = ["Joined", "count_all", "number_links", "stage_table"]


class Joined(NamedTuple):
    """All parts of a plan, joined, with the orders of its stages.

    ``groups`` and ``rounds`` are those of `Instances`, the latter for all iterations;
    ``order_start`` and ``order_words`` those of `FlatOrders`; ``ends`` are the producer and the
    consumer instance of every boundary; ``records_spans`` (0 or 1) makes space for spans. The
    first three arrays have one number for each host. The rest are concatenated records of integers
    and of seconds:

        stage      replicas, segments, buckets, outgoing ports, incoming ports; hosts; whether each
                   replica's device overlaps; buckets complete with each segment; outgoing ports;
                   incoming ports
                   seconds of each replica's pieces; of its segments; of the buckets
        boundary   pairs; for each: sender, receiver, returns, port down, port up
                   forward and backward seconds of each pair
        tie        stages, buckets, outgoing ports, incoming ports; stages; outgoing ports;
                   incoming ports
                   seconds of the buckets
    """

    micro_batches: int
    streams_each: int
    records_spans: int
    instances: int
    device_groups: int
    hosts: int
    has_links: bool
    boundaries: int
    ties: int
    host_slots: Whole
    half_duplex: Whole
    separate_links: Whole
    order_start: Whole
    order_words: Whole
    groups: Whole
    rounds: Whole
    stage: Whole
    stage_seconds: Real
    ends: Whole
    boundary: Whole
    boundary_seconds: Real
    tie: Whole
    tie_seconds: Real


# Columns of the table of instances: start of its two records, first replica, position of its first
# device; then the counts at the head of its record.
RECORD, REAL_RECORD, FIRST, DEVICE, REPLICAS, SEGMENTS, BUCKETS, OUTGOING, INCOMING = range(9)

STAGE_HEAD = 5
PAIR = 5
TIE_HEAD = 4


def stage_table(joined):
    """Where each instance's records start, its first replica and device, the head of its record."""
    table = np.zeros((joined.instances + 1, 9), dtype=np.int64)
    for s in range(joined.instances):
        record = table[s, RECORD]
        for column in range(REPLICAS, INCOMING + 1):
            table[s, column] = joined.stage[record + column - REPLICAS]
        replicas, segments = table[s, REPLICAS], table[s, SEGMENTS]
        lists = 2 * replicas + segments + table[s, OUTGOING] + table[s, INCOMING]
        seconds = replicas * (PIECES + segments) + table[s, BUCKETS]
        table[s + 1, RECORD] = record + STAGE_HEAD + lists
        table[s + 1, REAL_RECORD] = table[s, REAL_RECORD] + seconds
        table[s + 1, FIRST] = table[s, FIRST] + replicas
    place_devices(joined, table)
    return table


def place_devices(joined, table):
    """Write the first device position of every instance; the last row holds the device count."""
    groups = joined.device_groups
    first = np.zeros(groups + 1, dtype=np.int64)
    for s in range(joined.instances):
        first[joined.groups[s] + 1] = table[s, REPLICAS]
    for group in range(groups):
        first[group + 1] += first[group]
    for s in range(joined.instances):
        table[s, DEVICE] = first[joined.groups[s]]
    table[-1, DEVICE] = first[-1]


def number_links(joined, table):
    """For each device the start of its separate links and its index in its host; all links.

    Links are numbered from zero, host after host. Devices of hosts without separate links have -1.
    """
    hosts, devices = joined.hosts, table[-1, DEVICE]
    first, place = np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64)
    for device in range(devices):
        first[device] = -1
    if not joined.has_links:
        return first, place, 0
    host_of, held = np.zeros(devices, dtype=np.int64), np.zeros(hosts, dtype=np.int64)
    for s in range(joined.instances):
        for i in range(table[s, REPLICAS]):
            host_of[table[s, DEVICE] + i] = joined.stage[table[s, RECORD] + STAGE_HEAD + i]
    for device in range(devices):
        place[device] = held[host_of[device]]
        held[host_of[device]] += 1
    start = np.zeros(hosts + 1, dtype=np.int64)
    for host in range(hosts):
        links = held[host] * held[host] * joined.separate_links[host]
        start[host + 1] = start[host] + links
    for device in range(devices):
        host = host_of[device]
        if joined.separate_links[host]:
            first[device] = start[host] + held[host] * place[device]
    return first, place, start[hosts]


def count_ties(state, joined, table, each):
    """Count the buckets and occupied resources of ties."""
    record = 0
    for _ in range(joined.ties):
        users, buckets = joined.tie[record], joined.tie[record + 1]
        ports = joined.tie[record + 2] + joined.tie[record + 3]
        state.reductions += 1
        state.buckets += buckets
        state.items += buckets * joined.rounds[joined.tie[record + TIE_HEAD]]
        state.completions += users * buckets
        state.occupations += ports
        for k in range(users):
            replicas = table[joined.tie[record + TIE_HEAD + k], REPLICAS]
            state.members += replicas
            state.occupations += (2 + each) * replicas
        record += TIE_HEAD + users + ports


def count_messages(state, joined, each):
    """Count the messages of all boundaries, and an upper bound of the resources they occupy."""
    record = 0
    for _ in range(joined.boundaries):
        pairs = joined.boundary[record]
        for k in range(pairs):
            state.messages += 1 + joined.boundary[record + 1 + PAIR * k + 2]
        record += 1 + PAIR * pairs
    state.occupations += (4 + 2 * each) * state.messages


def count_instances(state, joined, table, each):
    """Count the segments of all instances, the buckets of their replicas, and the spans."""
    counted = np.zeros(joined.device_groups, dtype=np.int64)
    for s in range(joined.instances):
        replicas, segments, group = table[s, REPLICAS], table[s, SEGMENTS], joined.groups[s]
        state.instance_segments += segments
        state.replica_segments += replicas * segments
        if not counted[group]:
            counted[group] = 1
            first = group * joined.streams_each
            words = joined.order_start[first + joined.streams_each] - joined.order_start[first]
            state.action_spans += joined.records_spans * replicas * words
        if table[s, BUCKETS]:
            state.reductions += 1
            state.buckets += table[s, BUCKETS]
            state.items += table[s, BUCKETS] * joined.rounds[s]
            state.completions += table[s, BUCKETS]
            state.members += replicas
            ports = table[s, OUTGOING] + table[s, INCOMING]
            state.occupations += (2 + each) * replicas + ports


def count_all(state, joined, table, links):
    """Fill in the counts of an empty state."""
    state.instances, state.hosts = joined.instances, joined.hosts
    state.micro_batches, state.streams_each = joined.micro_batches, joined.streams_each
    for s in range(joined.instances):
        overlaps = table[s, RECORD] + STAGE_HEAD + table[s, REPLICAS]
        for k in range(table[s, REPLICAS]):
            if not joined.stage[overlaps + k]:
                several = links[0][table[s, DEVICE] + k] >= 0
                state.blocking |= STANDS_STILL | (SEVERAL if several else 0)
    # How many streams of a device a transfer may occupy.
    each = joined.streams_each * (state.blocking > 0)
    state.devices = table[-1, DEVICE]
    state.replicas = table[-1, FIRST]
    state.streams = state.devices * joined.streams_each
    count_instances(state, joined, table, each)
    count_ties(state, joined, table, each)
    count_messages(state, joined, each)
    state.lanes = state.messages + state.reductions
    state.items += state.messages * joined.micro_batches
    state.wires = 2 * state.devices + 2 * joined.hosts + links[2]
    state.resources = state.wires + state.streams
    state.words = joined.order_start[joined.device_groups * joined.streams_each]
    state.awaited = (1 + joined.streams_each) * state.replicas * joined.micro_batches
    state.records_spans = joined.records_spans
    state.item_spans = joined.records_spans * state.items
    leaves = 1
    state.first_leaf = 7
    while leaves < state.streams + state.lanes:
        state.first_leaf += leaves
        leaves *= 8
    state.places = state.first_leaf + leaves
