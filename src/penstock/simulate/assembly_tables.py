"""Counts that give the lengths of a workload's arrays, and positions of records in the input.

Compiled by numba, for `penstock.simulate.assembly`, which describes the records.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

import numpy as np

from penstock.simulate import layout as at
from penstock.simulate.layout import PIECES, SEVERAL, STANDS_STILL

__all__ = ["count_all", "last_of", "number_links", "stage_table"]

# Columns of the table of instances: start of its two records, first replica, position of its first
# device; then the counts at the head of its record.
RECORD, REAL_RECORD, FIRST, DEVICE, REPLICAS, SEGMENTS, BUCKETS, OUTGOING, INCOMING = range(9)

STAGE_HEAD = 5
PAIR = 5
TIE_HEAD = 4


def last_of(numbers):
    """The highest of some numbers, at least 0."""
    highest = 0
    for number in numbers:
        highest = max(highest, number)
    return highest


def stage_table(groups, stage_whole):
    """Where each instance's records start, its first replica and device, the head of its record."""
    table = np.zeros((len(groups) + 1, 9), dtype=np.int64)
    for s in range(len(groups)):
        record = table[s, RECORD]
        for column in range(REPLICAS, INCOMING + 1):
            table[s, column] = stage_whole[record + column - REPLICAS]
        replicas, segments = table[s, REPLICAS], table[s, SEGMENTS]
        lists = 2 * replicas + segments + table[s, OUTGOING] + table[s, INCOMING]
        seconds = replicas * (PIECES + segments) + table[s, BUCKETS]
        table[s + 1, RECORD] = record + STAGE_HEAD + lists
        table[s + 1, REAL_RECORD] = table[s, REAL_RECORD] + seconds
        table[s + 1, FIRST] = table[s, FIRST] + replicas
    place_devices(groups, table)
    return table


def place_devices(groups, table):
    """Write the first device position of every instance; the last row holds the device count."""
    first = np.zeros(last_of(groups) + 2, dtype=np.int64)
    for s in range(len(groups)):
        first[groups[s] + 1] = table[s, REPLICAS]
    for group in range(len(first) - 1):
        first[group + 1] += first[group]
    for s in range(len(groups)):
        table[s, DEVICE] = first[groups[s]]
    table[-1, DEVICE] = first[-1]


def number_links(table, groups, stage_whole, separate_links):
    """For each device the start of its separate links and its index in its host; all links.

    Links are numbered from zero, host after host. Devices of hosts without separate links have -1.
    """
    hosts, devices = len(separate_links), table[-1, DEVICE]
    first, place = np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64)
    for device in range(devices):
        first[device] = -1
    if last_of(separate_links) == 0:
        return first, place, 0
    host_of, held = np.zeros(devices, dtype=np.int64), np.zeros(hosts, dtype=np.int64)
    for s in range(len(groups)):
        for i in range(table[s, REPLICAS]):
            host_of[table[s, DEVICE] + i] = stage_whole[table[s, RECORD] + STAGE_HEAD + i]
    for device in range(devices):
        place[device] = held[host_of[device]]
        held[host_of[device]] += 1
    start = np.zeros(hosts + 1, dtype=np.int64)
    for host in range(hosts):
        start[host + 1] = start[host] + held[host] * held[host] * separate_links[host]
    for device in range(devices):
        host = host_of[device]
        if separate_links[host]:
            first[device] = start[host] + held[host] * place[device]
    return first, place, start[hosts]


def count_ties(w, table, tie_whole, rounds, each):
    """Count the buckets and occupied resources of ties."""
    record = 0
    while record < len(tie_whole):
        users, buckets = tie_whole[record], tie_whole[record + 1]
        ports = tie_whole[record + 2] + tie_whole[record + 3]
        w[at.REDUCTIONS] += 1
        w[at.BUCKETS] += buckets
        w[at.ITEMS] += buckets * rounds[tie_whole[record + TIE_HEAD]]
        w[at.COMPLETIONS] += users * buckets
        w[at.OCCUPATIONS] += ports
        for k in range(users):
            replicas = table[tie_whole[record + TIE_HEAD + k], REPLICAS]
            w[at.MEMBERS] += replicas
            w[at.OCCUPATIONS] += (2 + each) * replicas
        record += TIE_HEAD + users + ports


def count_messages(w, boundary_whole, each):
    """Count the messages of all boundaries, and an upper bound of the resources they occupy."""
    record = 0
    while record < len(boundary_whole):
        pairs = boundary_whole[record]
        for k in range(pairs):
            w[at.MESSAGES] += 1 + boundary_whole[record + 1 + PAIR * k + 2]
        record += 1 + PAIR * pairs
    w[at.OCCUPATIONS] += (4 + 2 * each) * w[at.MESSAGES]


def count_all(
    w, table, stage_whole, boundary_whole, tie_whole, order_start, rounds, groups, links, record
):
    """Fill in the counts of the header; instances, hosts and micro-batches are already there."""
    for s in range(w[at.INSTANCES]):
        overlaps = table[s, RECORD] + STAGE_HEAD + table[s, REPLICAS]
        for k in range(table[s, REPLICAS]):
            if not stage_whole[overlaps + k]:
                several = links[0][table[s, DEVICE] + k] >= 0
                w[at.BLOCKING] |= STANDS_STILL | (SEVERAL if several else 0)
    # How many streams of a device a transfer may occupy.
    each = w[at.STREAMS_EACH] * (w[at.BLOCKING] > 0)
    w[at.DEVICES] = table[-1, DEVICE]
    w[at.REPLICAS] = table[-1, FIRST]
    w[at.STREAMS] = w[at.DEVICES] * w[at.STREAMS_EACH]
    counted = np.zeros(last_of(groups) + 1, dtype=np.int64)
    for s in range(w[at.INSTANCES]):
        replicas, segments = table[s, REPLICAS], table[s, SEGMENTS]
        w[at.INSTANCE_SEGMENTS] += segments
        w[at.REPLICA_SEGMENTS] += replicas * segments
        if not counted[groups[s]]:
            counted[groups[s]] = 1
            first = groups[s] * w[at.STREAMS_EACH]
            words = order_start[first + w[at.STREAMS_EACH]] - order_start[first]
            w[at.ACTION_SPANS] += record * replicas * words
        if table[s, BUCKETS]:
            w[at.REDUCTIONS] += 1
            w[at.BUCKETS] += table[s, BUCKETS]
            w[at.ITEMS] += table[s, BUCKETS] * rounds[s]
            w[at.COMPLETIONS] += table[s, BUCKETS]
            w[at.MEMBERS] += replicas
            w[at.OCCUPATIONS] += (2 + each) * replicas + table[s, OUTGOING] + table[s, INCOMING]
    count_ties(w, table, tie_whole, rounds, each)
    count_messages(w, boundary_whole, each)
    w[at.LANES] = w[at.MESSAGES] + w[at.REDUCTIONS]
    w[at.ITEMS] += w[at.MESSAGES] * w[at.MICRO_BATCHES]
    w[at.WIRES] = 2 * w[at.DEVICES] + 2 * w[at.HOSTS] + links[2]
    w[at.RESOURCES] = w[at.WIRES] + w[at.STREAMS]
    w[at.WORDS] = order_start[-1]
    w[at.AWAITED] = (1 + w[at.STREAMS_EACH]) * w[at.REPLICAS] * w[at.MICRO_BATCHES]
    w[at.SPANS] = record
    w[at.ITEM_SPANS] = record * w[at.ITEMS]
    leaves = 1
    w[at.FIRST_LEAF] = 7
    while leaves < w[at.STREAMS] + w[at.LANES]:
        w[at.FIRST_LEAF] += leaves
        leaves *= 8
    w[at.PLACES] = w[at.FIRST_LEAF] + leaves
