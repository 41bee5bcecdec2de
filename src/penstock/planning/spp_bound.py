"""SPP's bound: the longest time that the list order 'wavefront' takes for a plan."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from penstock.cluster.collectives import (
    BUCKET_BYTES,
    RowTransfer,
    all_reduce_costs,
    message_resources,
    row_messages,
)
from penstock.plan.cost import crowding
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge
from penstock.simulate.catalogue import Catalogue
from penstock.simulate.instances import StageUse
from penstock.simulate.stage_work import StageWork

__all__ = ["is_spp_order", "spp_bound_s", "workload_s"]

Resource = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Occupation:
    """Seconds for which a message or an all-reduce occupies all of its resources at once."""

    seconds: float
    resources: frozenset[Resource]


def spp_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds in which the list order 'wavefront' finishes an iteration of a plan's stages.

        (1 + (4 S - 4) / M) C  +  max over stages n of R_n

    with ``S`` stages, ``M`` micro-batches and ``C`` the `workload_s`. Source: SPP (INFOCOM 2022).

    Proof: number the waves. In wave ``q`` micro-batch ``m`` is at position ``q - m`` of ``4 S - 3``
    (`wavefront`), so there are ``M + 4 S - 4`` waves. In one wave a stage does at most one forward
    and one backward. A message waits at most for those that share an engine or a port with it, one
    of each. So the work of a wave ends within ``C / M`` of the end of the wave before it.

    ``R_n`` is what follows the last backward. It is stage ``n``'s all-reduce in buckets, with all
    all-reduces that share an engine or port with it, and the optimizer's step. A bucket that is
    being sent is not interrupted, so it may delay the last gradients: the longest bucket of every
    reduction counts too. Skip tensors pass in the wave before the one that reads them. Devices that
    share cores count as if all of the plan's devices on a host computed at once.

    The theorem assumes that messages are sent wave by wave. The simulator sends first what is ready
    first. Where the messages of several stages compete for an engine or port, a later wave may go
    first. For such plans the bound is not proven, but it was never exceeded (2,000 random instances
    in the tests). It does not hold for other schedules, nor for a plan with ``in_flight_limit``.

    Infinite where a device stands still while a message of its own waits, or where messages go in
    order: then a wave may wait for devices of all stages, one after the other, which ``C`` does not
    count.
    """
    cluster = problem.cluster
    overlap = all(cluster.devices[device].overlaps_communication for device in plan.devices)
    if plan.stages[1:] and (cluster.messages_in_order or not overlap):
        return inf
    works = works_of(problem, plan)
    waves = plan.micro_batches + 4 * len(plan.stages) - 4
    workload = workload_of(problem, plan, works)
    return waves * workload / plan.micro_batches + ending_s(problem, plan, works)


def is_spp_order(plan: Plan) -> bool:
    """Whether `spp_bound_s` holds for ``plan``: SPP's list, not cut short, micro-batches split."""
    splits = not any(stage.in_turn for stage in plan.stages)
    return plan.schedule == "wavefront" and not plan.in_flight_limit and splits


def workload_s(problem: PlanningProblem, plan: Plan) -> float:
    """``C``: the seconds of all micro-batches on the busiest stage, or of the busiest messages.

    Every message of a micro-batch counts together with the other messages of that micro-batch, of
    any stages and both directions, that need one of its engines or ports.
    """
    return workload_of(problem, plan, works_of(problem, plan))


def workload_of(problem: PlanningProblem, plan: Plan, works: Sequence[StageWork]) -> float:
    """`workload_s` from the work of every stage."""
    messages = list(messages_of(problem, plan))
    busiest_s = max((shared_s(message, messages) for message in messages), default=0.0)
    computing_s = max(map(computing_of, plan.stages, works))
    return plan.micro_batches * max(
        crowding(problem.cluster, plan.devices) * computing_s, busiest_s
    )


def works_of(problem: PlanningProblem, plan: Plan) -> list[StageWork]:
    """The work of every stage as the simulator has it."""
    catalogue = Catalogue(problem.profile, problem.cluster)
    return [catalogue.stage(stage, StageUse()) for stage in plan.stages]


def computing_of(stage: Stage, work: StageWork) -> float:
    """Forward, backward and recompute of a micro-batch on the slowest replica.

    They include reads of parameters from off-chip memory, and what messages take of the device.
    """
    kinds = ("F", "B", "R") if stage.recompute else ("F", "B")
    return max(sum(replica.seconds(kind) for kind in kinds) for replica in work.replicas)


def shared_s(one: Occupation, others: Iterable[Occupation]) -> float:
    """Seconds of all that cannot run beside ``one``, itself included."""
    return sum(other.seconds for other in others if other.resources & one.resources)


def messages_of(problem: PlanningProblem, plan: Plan) -> Iterator[Occupation]:
    """The messages of one micro-batch between each pair of devices, in each direction."""
    cluster = problem.cluster
    seconds: dict[tuple[int, int, bool], float] = defaultdict(float)
    for edge, producer, consumer in edges_between_stages(problem, plan):
        down, up = (producer, consumer), (consumer, producer)
        for size, (source, target), back in (
            (edge.bytes, down, False),
            (edge.gradient_bytes, up, True),
        ):
            for message in pairs(size, source, target, back=back, whole=edge.goes_whole):
                key = (message.source, message.target, back)
                bytes_sent = size.at(message.rows)
                seconds[key] += cluster.transfer_s(message.source, message.target, bytes_sent)
    for (source, target, _), taken_s in seconds.items():
        if taken_s > 0:
            resources = message_resources(cluster, RowTransfer(source, target, 1))
            yield Occupation(taken_s, frozenset(resources))


def edges_between_stages(
    problem: PlanningProblem, plan: Plan
) -> Iterator[tuple[Edge, Stage, Stage]]:
    """Each tensor that a stage reads from another, once."""
    stage_of = [index for index, stage in enumerate(plan.stages) for _ in stage.layers]
    seen: set[tuple[str, int]] = set()
    for edge in problem.profile.edges:
        producer, consumer = stage_of[edge.producer], stage_of[edge.consumer]
        if producer != consumer and (edge.tensor, consumer) not in seen:
            seen.add((edge.tensor, consumer))
            yield edge, plan.stages[producer], plan.stages[consumer]


def pairs(
    size: Affine, source: Stage, target: Stage, *, back: bool, whole: bool
) -> Iterator[RowTransfer]:
    """The messages of one tensor; a ``whole`` one goes to replica ``j`` from ``j`` modulo all."""
    if not whole:
        yield from row_messages(source.devices, source.slices, target.devices, target.slices)
        return
    senders, receivers = (
        (target.devices, source.devices) if back else (source.devices, target.devices)
    )
    for j, receiver in enumerate(receivers):
        sender = senders[j % len(senders)]
        yield RowTransfer(receiver, sender, 1) if back else RowTransfer(sender, receiver, 1)


@dataclass(frozen=True, slots=True)
class ReductionOccupation:
    """An all-reduce as a whole, and the seconds of its longest bucket."""

    whole: Occupation
    bucket_s: float


def ending_s(problem: PlanningProblem, plan: Plan, works: Sequence[StageWork]) -> float:
    """The largest ``R_n``: all-reduces that share resources, buckets that delay, and the step."""
    reductions = list(reductions_of(problem, plan))
    wholes = [reduction.whole for reduction in reductions]
    reduced_s = max((shared_s(whole, wholes) for whole in wholes), default=0.0)
    held_up_s = sum(reduction.bucket_s for reduction in reductions) if plan.stages[1:] else 0.0
    step_s = max(replica.step_s for work in works for replica in work.replicas)
    return reduced_s + held_up_s + crowding(problem.cluster, plan.devices) * step_s


def reductions_of(problem: PlanningProblem, plan: Plan) -> Iterator[ReductionOccupation]:
    """The all-reduces among the replicas of a stage, and of tied parameters among all users."""
    profile = problem.profile
    for stage in plan.stages:
        size_bytes = sum(profile.layers[layer].parameter_bytes for layer in stage.layers)
        yield from reduction(problem, stage.devices, float(size_bytes))
    for shared in profile.shared:
        users = [s for s in plan.stages if any(layer in s.layers for layer in shared.layers)]
        devices = tuple(device for stage in users for device in stage.devices)
        yield from reduction(problem, devices, float(shared.bytes))


def reduction(
    problem: PlanningProblem, devices: tuple[int, ...], size_bytes: float
) -> Iterator[ReductionOccupation]:
    """One all-reduce, with the latency of as many buckets as it may have; none for one device."""
    cluster = problem.cluster
    costs = all_reduce_costs(cluster, devices)
    if not costs or not size_bytes:
        return
    # Buckets are nearly always more than half full.
    buckets = 1 + int(2 * size_bytes / BUCKET_BYTES)
    longest = min(size_bytes, BUCKET_BYTES)
    resources = {(kind, device) for device in devices for kind in ("send", "receive")}
    hosts = {cluster.host_index[device] for device in devices}
    if any(cluster.uses_port(i, j) for i, j in pairwise((*devices, devices[0]))) or len(hosts) > 1:
        resources |= {(kind, host) for host in hosts for kind in ("port out", "port in")}
    yield ReductionOccupation(
        Occupation(
            min(buckets * cost.of(size_bytes / buckets) for cost in costs),
            frozenset(resources),
        ),
        min(cost.of(longest) for cost in costs),
    )
