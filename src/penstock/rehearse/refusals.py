"""What cannot be rehearsed: plans that the emulation would carry out otherwise, or that need too
much memory."""

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.rehearse.emulation import Emulation
from penstock.simulate.simulation import check_plan_fits_inputs
from penstock.words import size_text

__all__ = ["check_can_be_rehearsed", "check_memory", "check_network"]

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


def check_network(emulation: Emulation) -> None:
    """Raise `BadInput` for a network that namespaces on a switch cannot stand for."""
    if emulation.network == "emulated":
        return
    plan, cluster = emulation.plan, emulation.cluster
    leave_out = "leave --network namespaces out, and the links are emulated"
    used = {cluster.host_index[device] for device in plan.devices}
    if len(used) < 2:
        raise BadInput(
            f"the plan uses one host, '{cluster.hosts[min(used)].name}', so nothing goes over a "
            f"network; {leave_out}"
        )
    if emulation.transport == "shared-memory":
        raise BadInput(
            "shared memory does not reach another host; leave --transport out with --network "
            "namespaces"
        )
    for link in cluster.links:
        ends = cluster.host_index[link.source], cluster.host_index[link.target]
        if ends[0] != ends[1]:
            raise BadInput(
                f"devices {link.source} and {link.target} of different hosts have a link of their "
                f"own, and namespaces have one port for each host; {leave_out}"
            )
    for index in sorted(used):
        if cluster.hosts[index].half_duplex:
            raise BadInput(
                f"both directions of the port of host '{cluster.hosts[index].name}' take turns, "
                f"which the kernel's links do not show; {leave_out}"
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
