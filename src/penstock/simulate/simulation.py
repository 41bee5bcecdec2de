"""What a plan will do on a cluster: its timeline, time, bubbles and memory."""

from dataclasses import dataclass

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.simulate import compiled, plain
from penstock.simulate.catalogue import workload_of
from penstock.simulate.memory import held_while, memory_samples, peaks_bytes
from penstock.simulate.trace import Engine, timeline_of
from penstock.simulate.workload import Workload
from penstock.timeline.metrics import bubble_fraction
from penstock.timeline.timeline import Timeline

__all__ = ["Prediction", "check_plan_fits_inputs", "simulate_plan"]

FEW_ACTIONS = 4000
"""Up to here the plain engine is done before numba is loaded."""


@dataclass(frozen=True)
class Prediction:
    """What simulating a plan predicts.

    ``peak_memory_bytes`` has one entry for each device of the cluster, 0 for one that the plan
    does not use; ``too_full`` are the devices whose memory it exceeds.
    """

    timeline: Timeline
    iteration_s: float
    bubble: float
    peak_memory_bytes: tuple[float, ...]
    too_full: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return not self.too_full


def simulate_plan(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
) -> Prediction:
    """Play one iteration of ``plan``; the same order of work that a run executes.

    A plan that does not fit in memory is simulated all the same; the prediction says so.

    Raises:
        BadInput: the plan is not one for this profile or cluster, or its schedule cannot be played.
    """
    check_plan_fits_inputs(plan, profile, cluster)
    schedule = order_of(plan)
    workload = workload_of(
        plan,
        profile,
        cluster,
        schedule,
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
    )
    trace = engine_for(workload)(workload)
    memory = memory_samples(workload, trace)
    held = held_while(schedule, len(plan.stages))
    peaks = peaks_bytes(workload.parts.stages, held, len(cluster.devices))
    timeline = timeline_of(workload, trace, len(cluster.devices), memory, "predicted")
    return Prediction(
        timeline=timeline,
        iteration_s=trace.iteration_s,
        bubble=bubble_fraction(timeline),
        peak_memory_bytes=peaks,
        too_full=tuple(
            i for i, device in enumerate(cluster.devices) if peaks[i] > device.memory_bytes
        ),
    )


def engine_for(workload: Workload) -> Engine:
    """The engine that has its answer first; both give the same."""
    if workload.actions <= FEW_ACTIONS:
        return plain.play
    return compiled.play


def check_plan_fits_inputs(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Raise `BadInput` unless the plan covers the profile's layers and the cluster its devices."""
    covered = plan.stages[-1].layers.stop
    if covered != len(profile.layers):
        raise BadInput(
            f"the plan covers layers [0, {covered}) but profile '{profile.name}' has "
            f"{len(profile.layers)} layers; plan again with this profile"
        )
    devices = len(cluster.devices)
    highest = max(max(stage.devices) for stage in plan.stages)
    if highest >= devices:
        raise BadInput(
            f"the plan uses device {highest} but the cluster has {devices} devices; use a cluster "
            f"with at least {highest + 1} devices or plan again for '{cluster.name}'"
        )
