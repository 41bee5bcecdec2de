"""Which replica sends which other how much, for one micro-batch of a plan."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.plan.row_split import RowOverlap, row_overlaps
from penstock.profile.model_profile import Affine, Edge
from penstock.simulate.workload import Direction, Message

__all__ = ["engines_and_ports", "messages_of"]


@dataclass(slots=True)
class Load:
    """Seconds and bytes of one pair of devices while its tensors are added up."""

    seconds: float = 0.0
    bytes: float = 0.0


def messages_of(plan: Plan, edges: Sequence[Edge], cluster: Cluster) -> tuple[Message, ...]:
    """The messages of every micro-batch, sorted by sender, direction and receiver.

    A tensor goes straight from the stage that makes it to each stage that reads it, once; each
    replica sends each replica the rows that both hold. A tensor without rows goes whole, to
    receiver ``j`` from sender ``j`` modulo the senders. Tensors of one pair and direction leave
    together, each with its own latency. Neighbouring stages depend on each other even where no
    tensor passes (`penstock.schedule.dependencies`): that message takes no time.
    """
    starts = [0]
    for stage in plan.stages:
        starts.append(starts[-1] + stage.replicas)
    devices = plan.devices
    loads: dict[tuple[int, Direction, int], Load] = defaultdict(Load)
    for s in range(len(plan.stages) - 1):
        for overlap in overlaps(plan.stages[s].slices, plan.stages[s + 1].slices):
            i, j = starts[s] + overlap.sender, starts[s + 1] + overlap.receiver
            loads[i, "F", j] = Load()
            loads[j, "B", i] = Load()
    for edge, producer, consumer in edges_between_stages(plan, edges):
        for i, j, rows in pairs(plan, edge, producer, consumer):
            sender, receiver = starts[producer] + i, starts[consumer] + j
            add(loads[sender, "F", receiver], cluster, edge.bytes, rows, devices, sender, receiver)
            if edge.gradient_bytes.at(rows) > 0:
                back = loads[receiver, "B", sender]
                add(back, cluster, edge.gradient_bytes, rows, devices, receiver, sender)
    return tuple(
        Message(
            sender,
            receiver,
            direction,
            load.seconds,
            load.bytes,
            engines_and_ports(cluster, devices, (sender,), (receiver,)),
        )
        for (sender, direction, receiver), load in sorted(loads.items(), key=lambda item: item[0])
    )


@lru_cache(maxsize=1024)
def overlaps(senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[RowOverlap, ...]:
    """`row_overlaps`, remembered: planners score many plans with the same few slices."""
    return row_overlaps(senders, receivers)


def edges_between_stages(plan: Plan, edges: Iterable[Edge]) -> list[tuple[Edge, int, int]]:
    """Each tensor that a stage reads from another, once, with producer and consumer stage."""
    stage_of = [s for s, stage in enumerate(plan.stages) for _ in stage.layers]
    found: dict[tuple[str, int], tuple[Edge, int, int]] = {}
    for edge in edges:
        producer, consumer = stage_of[edge.producer], stage_of[edge.consumer]
        if producer != consumer:
            found.setdefault((edge.tensor, consumer), (edge, producer, consumer))
    return list(found.values())


def pairs(plan: Plan, edge: Edge, producer: int, consumer: int) -> list[tuple[int, int, int]]:
    """Sender replica, receiver replica and rows of each message of one tensor."""
    senders, receivers = plan.stages[producer].slices, plan.stages[consumer].slices
    if edge.bytes.fixed > 0 and edge.bytes.per_sample == 0:
        return [(j % len(senders), j, 1) for j in range(len(receivers))]
    return [(o.sender, o.receiver, len(o.rows)) for o in overlaps(senders, receivers)]


def add(
    load: Load,
    cluster: Cluster,
    size: Affine,
    rows: int,
    devices: Sequence[int],
    sender: int,
    receiver: int,
) -> None:
    """Add one tensor's transfer to what the pair sends anyway."""
    size_bytes = size.at(rows)
    load.bytes += size_bytes
    load.seconds += cluster.transfer_s(devices[sender], devices[receiver], size_bytes)


def engines_and_ports(
    cluster: Cluster, devices: Sequence[int], senders: Sequence[int], receivers: Sequence[int]
) -> tuple[int, ...]:
    """What a transfer between positions occupies, numbered as `Workload` says."""
    ports_start = 2 * len(devices)
    hosts = len(cluster.hosts)
    occupied = {*senders} | {len(devices) + receiver for receiver in receivers}
    for i in senders:
        for j in receivers:
            if i != j and cluster.uses_port(devices[i], devices[j]):
                occupied.add(ports_start + cluster.host_index[devices[i]])
                occupied.add(ports_start + hosts + cluster.host_index[devices[j]])
    return tuple(sorted(occupied))
