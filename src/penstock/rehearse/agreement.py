"""Whether a rehearsal did what its plan says: the order, the bytes, the micro-batches in flight."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.plan.ordering import order_of
from penstock.rehearse.rehearsal import Rehearsal
from penstock.schedule.action import Action
from penstock.simulate.catalogue import workload_of
from penstock.simulate.workload import Workload

__all__ = ["LinkTraffic", "differences", "peaks_in_flight", "traffic"]

ROUNDING = 1e-6
"""Bytes may differ by so much of their sum."""


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What one device sent another in an iteration, and how long any of it was under way."""

    source: int
    target: int
    messages: int
    bytes: float
    busy_s: float


def differences(rehearsal: Rehearsal) -> list[str]:
    """What was done otherwise than the plan says, a line each; the times are not looked at."""
    emulation = rehearsal.emulation
    schedule = order_of(emulation.plan)
    workload = workload_of(emulation.plan, emulation.profile, emulation.cluster, schedule)
    orders = {d.device: tuple(schedule.of(d.group)) for d in workload.devices}
    found: list[str] = []
    for iteration in range(emulation.iterations):
        for rank in range(len(rehearsal.ranks)):
            done = actions_of(rehearsal, rank, iteration)
            found += difference_of_order(rank, iteration, done, orders.get(rank, ()))
        found += list(differences_of_bytes(rehearsal, workload, iteration))
    return found


def actions_of(rehearsal: Rehearsal, rank: int, iteration: int) -> tuple[Action, ...]:
    """What a rank computed in an iteration, in the order in which it did."""
    return tuple(
        Action(record.kind, record.stage, record.micro_batch)
        for record in rehearsal.ranks[rank].records[iteration]
        if record.kind in ("F", "B", "I", "W", "R")
    )


def difference_of_order(
    rank: int, iteration: int, done: Sequence[Action], planned: Sequence[Action]
) -> list[str]:
    """The first action that is not the planned one; empty if there is none."""
    if tuple(done) == tuple(planned):
        return []
    for position, (one, other) in enumerate(zip(done, planned, strict=False)):
        if one != other:
            return [
                f"iteration {iteration}: action {position} of rank {rank} was {one} where the "
                f"schedule has {other}"
            ]
    return [
        f"iteration {iteration}: rank {rank} did {len(done)} actions where the schedule has "
        f"{len(planned)}"
    ]


def differences_of_bytes(rehearsal: Rehearsal, workload: Workload, iteration: int) -> Iterator[str]:
    """Pairs of devices, and sums, with other bytes than the simulator counts."""
    planned: dict[tuple[int, int], float] = defaultdict(float)
    summed: dict[tuple[int, ...], float] = defaultdict(float)
    for message in workload.messages:
        ends = (workload.replicas[end] for end in (message.sender, message.receiver))
        source, target = (workload.devices[end.position].device for end in ends)
        if source != target:
            planned[source, target] += message.bytes * micro_batches_of(workload, message.sender)
    for reduction in workload.reductions:
        held = (workload.replicas[m].position for m in reduction.members)
        devices = tuple(sorted({workload.devices[position].device for position in held}))
        summed[devices] += sum(bucket.bytes for bucket in reduction.buckets)
    sent: dict[tuple[int, int], float] = defaultdict(float)
    reduced: dict[tuple[int, ...], float] = defaultdict(float)
    for started in rehearsal.transfers_of(iteration):
        transfer = started.transfer
        if transfer.members:
            reduced[tuple(sorted(transfer.members))] += transfer.bytes
        else:
            sent[transfer.source, transfer.target] += transfer.bytes
    for pair in sorted(planned.keys() | sent.keys()):
        if abs(planned[pair] - sent[pair]) > ROUNDING * max(planned[pair], sent[pair]):
            yield (
                f"iteration {iteration}: rank {pair[0]} sent rank {pair[1]} {sent[pair]:.0f} bytes "
                f"where the plan has {planned[pair]:.0f}"
            )
    for group in sorted(summed.keys() | reduced.keys()):
        if abs(summed[group] - reduced[group]) > ROUNDING * max(summed[group], reduced[group]):
            yield (
                f"iteration {iteration}: ranks {list(group)} summed {reduced[group]:.0f} bytes of "
                f"gradients where the plan has {summed[group]:.0f}"
            )


def micro_batches_of(workload: Workload, replica: int) -> int:
    """The number of micro-batches that an instance works on: half of them in mirrored pipelines."""
    instances = workload.instances
    if not instances.mirrored:
        return workload.micro_batches
    odd = workload.replicas[replica].instance >= instances.stages
    return (workload.micro_batches + (0 if odd else 1)) // 2


def peak_in_flight(done: Sequence[Action]) -> int:
    """The most micro-batches of any stage between their forward and the end of their backward."""
    counts, ends = Counter[int](), {(a.stage, a.micro_batch) for a in done if a.kind == "W"}
    most = 0
    for action in done:
        last = "W" if (action.stage, action.micro_batch) in ends else "B"
        if action.kind == "F":
            counts[action.stage] += 1
            most = max(most, counts[action.stage])
        elif action.kind == last:
            counts[action.stage] -= 1
    return most


def peaks_in_flight(rehearsal: Rehearsal) -> list[int]:
    """`peak_in_flight` of each rank in the first iteration."""
    return [peak_in_flight(actions_of(rehearsal, rank, 0)) for rank in range(len(rehearsal.ranks))]


def traffic(rehearsal: Rehearsal) -> list[LinkTraffic]:
    """What went from each device to each other in the last iteration, most busy first."""
    scale = rehearsal.emulation.time_scale
    found: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for started in rehearsal.transfers_of(rehearsal.emulation.iterations - 1):
        transfer = started.transfer
        if not transfer.members:
            sums = found[transfer.source, transfer.target]
            sums[0] += 1
            sums[1] += transfer.bytes
            sums[2] += (started.end_s - started.start_s) / scale
    rows = (LinkTraffic(*ends, int(s[0]), s[1], s[2]) for ends, s in found.items())
    return sorted(rows, key=lambda row: -row.busy_s)
