"""The emulation in a rehearsal: a plan on a cluster, at a scale of time and of bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.errors import BadInput
from penstock.machine import free_host_memory, usable_cores
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.profile.model_profile import Edge, ModelProfile
from penstock.runtime.transport.transport import TransportChoice
from penstock.simulate.catalogue import workload_of
from penstock.simulate.simulation import check_plan_fits_inputs, simulate_plan
from penstock.text import size_text

PIECES = 4
"""A layer's parameters come in pieces of at most this part of a bucket, as real ones would."""

RANK_BYTES = 160 << 20
"""Bytes that a process itself needs, measured on Linux with torch 2.13."""

EACH_S = 0.015
"""Seconds of a core for each action and each message, of which this machine works a small part."""

SHORTEST_S = 2.0
"""Least seconds of an iteration here, so that single late wake-ups do not count."""

LONGEST_S = 12.0
"""Most seconds of an iteration here: nobody waits for minutes to see a plan."""

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


Crossings: TypeAlias = Mapping[tuple[int, int, str], Edge]
"""The tensors between stages by producer, consumer and a name that is unique in the model."""


def crossings_of(plan: Plan, profile: ModelProfile) -> Crossings:
    """Each tensor that stages send to each other, as `Plan.senders` says, sorted."""
    found: dict[tuple[int, int, str], Edge] = {}
    stage_of = [s for s, stage in enumerate(plan.stages) for _ in stage.layers]
    readers: dict[tuple[int, str], dict[int, Edge]] = {}
    for edge in sorted(profile.edges, key=lambda edge: edge.consumer):
        maker, reader = stage_of[edge.producer], stage_of[edge.consumer]
        if maker != reader and max(edge.bytes.at(1), edge.gradient_bytes.at(1)) > 0:
            name = f"{edge.producer}.{edge.tensor}"
            readers.setdefault((maker, name), {}).setdefault(reader, edge)
    for (maker, name), edges in readers.items():
        for sender, reader in plan.senders(maker, edges):
            found[sender, reader, name] = edges[reader]
    return dict(sorted(found.items(), key=itemgetter(0)))


class SharedPiece(NamedTuple):
    """A parameter, or a piece of one, that ``stages`` use on the ranks ``holders``.

    Its gradient is complete with that of ``layer``, or of the first layer of a stage after it: of
    every stage if ``layer`` is 0, as for tied parameters.
    """

    name: str
    bytes: float
    layer: int
    stages: tuple[int, ...]
    holders: tuple[int, ...]


def shared_pieces(plan: Plan, profile: ModelProfile) -> Iterator[SharedPiece]:
    """The parameters that several ranks hold, of layers and tied ones; no others are emulated."""
    users: list[tuple[str, float, int, tuple[int, ...]]] = []
    for layer, cost in enumerate(profile.layers):
        pieces = ceil(cost.parameter_bytes * PIECES / BUCKET_BYTES)
        size_bytes = cost.parameter_bytes / max(1, pieces)
        users += [(f"{layer}.{piece}", size_bytes, layer, (layer,)) for piece in range(pieces)]
    users += [(f"tied {tied.name}", tied.bytes, 0, tied.layers) for tied in profile.shared]
    for name, size_bytes, layer, layers in users:
        stages = tuple(sorted({plan.stage_of_layer(user) for user in layers}))
        held = (device for stage in stages for device in plan.devices_of(stage))
        holders = tuple(dict.fromkeys(held))
        if size_bytes and len(holders) > 1:
            yield SharedPiece(name, size_bytes, layer, stages, holders)


def emulation_of(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    time_scale: float = 0.0,
    iterations: int = 2,
) -> Emulation:
    """The emulation of a plan; a time scale of 0 is chosen."""
    if plan.state_on == "host":
        profile = profile.stepped_on_host
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
    pieces = shared_pieces(plan, profile)
    held = sum(piece.bytes * len(piece.holders) for piece in pieces)
    # Each parameter has a gradient.
    needed, free_bytes = found.ranks * RANK_BYTES + 2 * held * byte_scale, free_host_memory().bytes
    if needed > free_bytes:
        raise BadInput(
            f"{found.ranks} ranks need about {size_text(needed)} of memory and "
            f"{size_text(free_bytes)} are free; rehearse a plan for fewer devices"
        )
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
    joined = {(producer, consumer) for producer, consumer, _ in crossings_of(plan, profile)}
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
