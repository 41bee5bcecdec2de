"""SPP's bound: the longest time that the list order 'wavefront' takes for a plan."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import message_resources
from penstock.core.native import GradientShare, Ports
from penstock.costs.tables import crowding
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.simulate.catalogue import Catalogue
from penstock.simulate.orders import one_instance_a_stage
from penstock.simulate.workload import Parts

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
    parts = parts_of_plan(problem, plan)
    waves = plan.micro_batches + 4 * len(plan.stages) - 4
    workload = workload_of_parts(problem, plan, parts)
    return waves * workload / plan.micro_batches + ending_s(problem, plan, parts)


def is_spp_order(plan: Plan) -> bool:
    """Return whether `spp_bound_s` holds: SPP's list, not cut short, micro-batches split."""
    splits = not any(stage.in_turn for stage in plan.stages)
    return plan.schedule == "wavefront" and not plan.in_flight_limit and splits


def workload_s(problem: PlanningProblem, plan: Plan) -> float:
    """``C``: the seconds of all micro-batches on the busiest stage, or of the busiest messages.

    Every message of a micro-batch counts together with the other messages of that micro-batch, of
    any stages and both directions, that need one of its engines or ports.
    """
    return workload_of_parts(problem, plan, parts_of_plan(problem, plan))


def workload_of_parts(problem: PlanningProblem, plan: Plan, parts: Parts) -> float:
    messages = list(messages_of(problem.cluster, parts))
    busiest_s = max((shared_s(message, messages) for message in messages), default=0.0)
    # With reads of parameters from off-chip memory, and what messages take of the device.
    computing_s = max(
        sum(replica.seconds(kind) for kind in ("FBR" if stage.recompute else "FB"))
        for stage, work in zip(plan.stages, parts.stages, strict=True)
        for replica in work.replicas
    )
    return plan.micro_batches * max(
        crowding(problem.cluster, plan.devices) * computing_s, busiest_s
    )


def parts_of_plan(problem: PlanningProblem, plan: Plan) -> Parts:
    """The work of a plan as the simulator has it."""
    catalogue = Catalogue(problem.profile, problem.cluster)
    return catalogue.parts_of(plan, one_instance_a_stage(len(plan.stages)))


def shared_s(one: Occupation, others: Iterable[Occupation]) -> float:
    """Seconds of all that cannot run beside ``one``, itself included."""
    return sum(other.seconds for other in others if other.resources & one.resources)


def messages_of(cluster: Cluster, parts: Parts) -> Iterator[Occupation]:
    """The messages of one micro-batch between each pair of devices, in each direction."""
    for producer, consumer, boundary in parts.boundaries:
        above, below = parts.stages[producer].devices, parts.stages[consumer].devices
        for pair in boundary.pairs:
            down, up = above[pair.sender], below[pair.receiver]
            for ends, seconds in (((down, up), pair.forward_s), ((up, down), pair.backward_s)):
                if seconds > 0:
                    yield Occupation(seconds, frozenset(message_resources(cluster, *ends)))


def ending_s(problem: PlanningProblem, plan: Plan, parts: Parts) -> float:
    """The largest ``R_n``: all-reduces that share resources, buckets that delay, and the step."""
    works = parts.stages
    reduced = [(work.devices, work.shares, work.ports) for work in works]
    for tie in parts.ties:
        devices = tuple(device for stage in tie.stages for device in works[stage].devices)
        reduced.append((devices, tie.shares, tie.ports))
    reductions = [reduction(*one) for one in reduced if one[1]]
    reduced_s = max((shared_s(one, reductions) for one in reductions), default=0.0)
    longest = (max(share.seconds for share in shares) for _, shares, _ in reduced if shares)
    held_up_s = sum(longest) if plan.stages[1:] else 0.0
    step_s = max(replica.step_s for work in works for replica in work.replicas)
    return reduced_s + held_up_s + crowding(problem.cluster, plan.devices) * step_s


def reduction(devices: Sequence[int], shares: Sequence[GradientShare], ports: Ports) -> Occupation:
    engines = {(kind, device) for device in devices for kind in ("send", "receive")}
    hosts = {("port out", host) for host in ports.outgoing}
    hosts |= {("port in", host) for host in ports.incoming}
    seconds = sum(share.buckets * share.seconds for share in shares)
    return Occupation(seconds, frozenset(engines | hosts))
