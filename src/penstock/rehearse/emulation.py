"""What a rehearsal carries out: a plan on a cluster, at a scale of time and of bytes."""

from dataclasses import dataclass

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.machine import free_host_memory, usable_cores
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.profile.model_profile import Edge, ModelProfile
from penstock.runtime.transport.transport import TransportChoice
from penstock.simulate.catalogue import workload_of
from penstock.simulate.simulation import check_plan_fits_inputs, simulate_plan
from penstock.words import size_text

RANK_BYTES = 160 << 20
"""What a process needs of its own, measured on Linux with torch 2.13."""

EACH_S = 0.015
"""Seconds of a core for each action and each message, of which this machine works a small part."""

SHORTEST_S = 2.0
"""An iteration takes at least this long here, so that single late wake-ups do not count."""

LONGEST_S = 12.0
"""And no longer than this: nobody waits for minutes to see a plan."""

MOST_BYTES = 8 << 20
"""The bytes of an iteration's messages together. Copies of 64 MiB took 1 to 2 % of an iteration."""


@dataclass(frozen=True)
class Emulation:
    """A plan, what it is for, and how it is carried out.

    Every second of the plan takes ``time_scale`` seconds here. Tensors have ``byte_scale`` times
    the planned bytes; links and sums take the time of the planned ones.
    """

    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    time_scale: float
    byte_scale: float
    iterations: int
    transport: TransportChoice = "auto"

    @property
    def ranks(self) -> int:
        """One process for each device up to the last that the plan uses."""
        return max(self.plan.devices) + 1


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that one stage makes and another reads; ``name`` is unique in the model."""

    producer: int
    consumer: int
    name: str
    edge: Edge


def crossings_of(plan: Plan, profile: ModelProfile) -> tuple[Crossing, ...]:
    """Each tensor that crosses between stages, once for every stage that reads it."""
    found: dict[tuple[int, int, str], Crossing] = {}
    stage_of = [s for s, stage in enumerate(plan.stages) for _ in stage.layers]
    for edge in profile.edges:
        ends = stage_of[edge.producer], stage_of[edge.consumer]
        name = f"{edge.producer}.{edge.tensor}"
        if ends[0] != ends[1] and max(edge.bytes.at(1), edge.gradient_bytes.at(1)) > 0:
            found.setdefault((*ends, name), Crossing(*ends, name, edge))
    return tuple(found[key] for key in sorted(found))


def emulation_of(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    time_scale: float = 0.0,
    iterations: int = 2,
) -> Emulation:
    """How to carry out a plan; a time scale of 0 is chosen."""
    check_can_be_rehearsed(plan, profile, cluster)
    workload = workload_of(plan, profile, cluster, order_of(plan))
    sent_bytes = sum(message.bytes for message in workload.messages) * workload.micro_batches
    summed_bytes = sum(bucket.bytes for r in workload.reductions for bucket in r.buckets)
    byte_scale = min(1.0, MOST_BYTES / max(1.0, sent_bytes + summed_bytes))
    if not time_scale:
        # The host's work for an action must be small beside the time in which it happens.
        iteration_s = simulate_plan(plan, profile, cluster).iteration_s
        messages = len(workload.messages) * workload.micro_batches
        wanted_s = (workload.actions + messages) * EACH_S / usable_cores()
        least_s = min(LONGEST_S, max(SHORTEST_S, wanted_s))
        time_scale = max(1.0, least_s / iteration_s) if iteration_s > 0 else 1.0
    found = Emulation(plan, profile, cluster, time_scale, byte_scale, iterations)
    check_memory(found, free_host_memory().bytes)
    return found


def check_can_be_rehearsed(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Raise for a plan that the emulation would carry out otherwise than it says."""
    check_plan_fits_inputs(plan, profile, cluster)
    schedule = order_of(plan)
    if schedule.concurrent:
        raise BadInput(
            f"schedule '{plan.schedule}' runs a forward beside a backward on each device, and a "
            f"rank does one thing at a time; rehearse a plan with another schedule"
        )
    if cluster.messages_in_order:
        raise BadInput(
            f"messages of cluster '{cluster.name}' go in order, as over NCCL, and those of a "
            f'rehearsal as they are ready; write messages = "as ready" into a copy of its file'
        )
    turns = [number for number, stage in enumerate(plan.stages) if stage.in_turn]
    if turns:
        raise BadInput(
            f"the devices of stages {turns} take whole micro-batches in turn, which is not "
            f"rehearsed; split micro-batches over them, or train the plan"
        )
    if schedule.weights.micro_batches_per_update:
        raise BadInput(
            f"schedule '{plan.schedule}' updates weights without a flush, which is not rehearsed; "
            f"simulate or train the plan"
        )
    joined = {(crossing.producer, crossing.consumer) for crossing in crossings_of(plan, profile)}
    for stage in range(len(plan.stages) - 1):
        if (stage, stage + 1) not in joined:
            raise BadInput(
                f"stages {stage} and {stage + 1} share no tensor in profile '{profile.name}', so "
                f"their ranks would not wait for one another as the plan says; give the profile "
                f"the tensors between its layers, or cut the model elsewhere"
            )
    used = {cluster.host_index[device] for device in plan.devices}
    for index in sorted(used):
        host = cluster.hosts[index]
        if 0 < host.full_speed_devices < len(host.devices):
            raise BadInput(
                f"devices of host '{host.name}' share cores (full_speed_devices), which is not "
                f"rehearsed; simulate the plan, or train it"
            )
        if not all(device.overlaps_communication for device in host.devices):
            raise BadInput(
                f"devices of host '{host.name}' compute nothing while they send, which is not "
                f"rehearsed yet; set overlaps_communication to true"
            )


def check_memory(emulation: Emulation, free_bytes: float) -> None:
    """Raise `BadInput` if the processes need more memory than there is."""
    plan, profile = emulation.plan, emulation.profile
    shared = [number for number in range(len(plan.stages)) if len(plan.devices_of(number)) > 1]
    held = sum(
        profile.layers[layer].parameter_bytes * len(plan.devices_of(number))
        for number in shared
        for layer in plan.stages[number].layers
    )
    # Each parameter has a gradient.
    needed = emulation.ranks * RANK_BYTES + 2 * held * emulation.byte_scale
    if needed > free_bytes:
        raise BadInput(
            f"{emulation.ranks} ranks need about {size_text(needed)} of memory and "
            f"{size_text(free_bytes)} are free; rehearse a plan for fewer devices"
        )
