"""Seconds of the messages that pipelines exchange: gradient all-reduce and re-cut rows."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from penstock.cluster.cluster import Cluster

__all__ = ["all_reduce_s", "split_concat_s"]


def all_reduce_s(cluster: Cluster, devices: Sequence[int], size_bytes: float) -> float:
    """Seconds to sum ``size_bytes`` over ``devices`` and give each the sum.

    The faster of two ways:

        ring           2 (r-1)/r * bytes / slowest link   + 2 (r-1) * latency
        hierarchical   reduce inside every host, ring over one device of each, broadcast inside

    The ring passes through the hosts one after the other, so every port carries it once in each
    direction. Nothing to do for one device, or for no bytes.

    Source: ring as in DAPPLE (PPoPP 2021), section on all-reduce; bandwidth-optimal by Patarasuk
    and Yuan (2009). The hierarchy is that of Horovod and NCCL's two-level algorithms.
    """
    if len(devices) < 2 or size_bytes <= 0:
        return 0.0
    ring = sorted(devices, key=lambda device: (cluster.host_index[device], device))
    flat_s = ring_s(cluster, ring, size_bytes)
    by_host: dict[int, list[int]] = defaultdict(list)
    for device in ring:
        by_host[cluster.host_index[device]].append(device)
    groups = list(by_host.values())
    if len(groups) in (1, len(ring)):
        return flat_s
    inside_s = max(chain_s(cluster, group, size_bytes) for group in groups)
    across_s = ring_s(cluster, [group[0] for group in groups], size_bytes)
    return min(flat_s, 2 * inside_s + across_s)


def ring_s(cluster: Cluster, ring: Sequence[int], size_bytes: float) -> float:
    """Seconds of a ring all-reduce in the given order."""
    links = list(pairwise([*ring, ring[0]]))
    slowest = min(cluster.bandwidth(source, target) for source, target in links)
    latency_s = max(cluster.latency(source, target) for source, target in links)
    steps = len(ring) - 1
    return 2 * steps / len(ring) * size_bytes / slowest + 2 * steps * latency_s


def chain_s(cluster: Cluster, group: Sequence[int], size_bytes: float) -> float:
    """Seconds to reduce to (or broadcast from) one device of a group, pipelined along a chain."""
    links = list(pairwise(group))
    if not links:
        return 0.0
    slowest = min(cluster.bandwidth(source, target) for source, target in links)
    return size_bytes / slowest + sum(cluster.latency(*link) for link in links)


def split_concat_s(
    cluster: Cluster,
    sender_devices: Sequence[int],
    sender_slices: Sequence[int],
    receiver_devices: Sequence[int],
    receiver_slices: Sequence[int],
    bytes_of_rows: Callable[[int], float],
) -> float:
    """Seconds until the rows of one micro-batch have moved from one stage's replicas to another's.

    Each sender sends each receiver the rows that both hold (split/concat of DAPPLE, PPoPP 2021):

        sender slices     |   0   |   1   |
        receiver slices   |  0 | 1  |  2  |        messages 0->0, 0->1, 1->1, 1->2

    A device sends its messages one after the other, receives them one after the other, and the
    messages of a host share its port; the busiest of these resources decides.
    ``bytes_of_rows(n)`` are the bytes of ``n`` rows.
    """
    busy_s: defaultdict[tuple[str, int], float] = defaultdict(float)
    ends = [list(accumulate(slices, initial=0)) for slices in (sender_slices, receiver_slices)]
    senders, receivers = (list(pairwise(end)) for end in ends)
    for source, have in zip(sender_devices, senders, strict=True):
        for target, need in zip(receiver_devices, receivers, strict=True):
            rows = min(have[1], need[1]) - max(have[0], need[0])
            if rows <= 0 or source == target:
                continue
            message_s = cluster.transfer_s(source, target, bytes_of_rows(rows))
            busy_s["send", source] += message_s
            busy_s["receive", target] += message_s
            if cluster.uses_port(source, target):
                busy_s["port out", cluster.host_index[source]] += message_s
                busy_s["port in", cluster.host_index[target]] += message_s
    return max(busy_s.values(), default=0.0)
