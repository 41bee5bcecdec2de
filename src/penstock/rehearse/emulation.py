"""What a rehearsal carries out: a plan on a cluster, at a scale of time and of bytes."""

from dataclasses import dataclass

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.profile.model_profile import Edge, ModelProfile
from penstock.runtime.transport.transport import TransportChoice
from penstock.simulate.simulation import check_plan_fits_inputs
from penstock.words import size_text

__all__ = ["Crossing", "Emulation", "check_can_be_rehearsed", "check_memory", "crossings_of"]


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


RANK_BYTES = 160 << 20
"""What a process needs of its own, measured on Linux with torch 2.13."""


def check_can_be_rehearsed(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Raise for a plan that the emulation would carry out otherwise than it says.

    Raises:
        BadInput: plan, profile and cluster do not fit together; the schedule does two things at
            once, or sums gradients without a flush; or devices do not overlap messages with
            compute.
    """
    check_plan_fits_inputs(plan, profile, cluster)
    schedule = order_of(plan)
    if schedule.concurrent:
        raise BadInput(
            f"schedule '{plan.schedule}' runs a forward beside a backward on each device, and a "
            f"rank does one thing at a time; rehearse a plan with another schedule"
        )
    replicated = max(stage.replicas for stage in plan.stages) > 1
    if schedule.weights.micro_batches_per_update and replicated:
        raise BadInput(
            f"schedule '{plan.schedule}' sums gradients at each update without a flush, which is "
            f"not rehearsed yet; rehearse a plan with one device for each stage"
        )
    used = {cluster.host_index[device] for device in plan.devices}
    for index in sorted(used):
        host = cluster.hosts[index]
        if not all(device.overlaps_communication for device in host.devices):
            raise BadInput(
                f"devices of host '{host.name}' compute nothing while they send, which is not "
                f"rehearsed yet; set overlaps_communication to true"
            )


def check_memory(emulation: Emulation, free_bytes: float) -> None:
    """Raise `BadInput` if the processes need more memory than there is."""
    plan, profile = emulation.plan, emulation.profile
    held = sum(
        profile.layers[layer].parameter_bytes * len(holders)
        for stage, holders in zip(
            plan.stages, map(plan.devices_of, range(len(plan.stages))), strict=True
        )
        for layer in stage.layers
        if len(holders) > 1
    )
    # Each parameter has a gradient.
    needed = emulation.ranks * RANK_BYTES + 2 * held * emulation.byte_scale
    if needed > free_bytes:
        raise BadInput(
            f"{emulation.ranks} ranks need about {size_text(needed)} of memory and "
            f"{size_text(free_bytes)} are free; rehearse a plan for fewer devices, or with a "
            f"smaller --byte-scale than {emulation.byte_scale:.2g}"
        )
