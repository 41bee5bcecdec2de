"""Simulates a plan on a cluster: timeline, iteration time, bubble and memory."""

from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.choices import choice_refusal
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.plan.problem import check_speeds
from penstock.profile.model_profile import ModelProfile
from penstock.simulate import compiled
from penstock.simulate.catalogue import workload_of
from penstock.simulate.memory import held_while, memory_samples, peaks_bytes
from penstock.simulate.trace import timeline_of
from penstock.text import html_table, numbered, percent_text, seconds_text, size_text
from penstock.timeline.metrics import bubble_fraction, peak_memory_bytes
from penstock.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Prediction:
    """The prediction for a plan.

    ``iteration_s`` are the seconds of the first iteration; ``steady_s`` is what each further one
    adds. ``bubble`` is the idle fraction of the devices' time. ``peak_memory_bytes`` has one entry
    for each device of the cluster, 0 if the plan does not use it. ``too_full`` are the devices that
    have too little memory.
    """

    timeline: Timeline
    iteration_s: float
    bubble: float
    peak_memory_bytes: tuple[float, ...]
    too_full: tuple[int, ...]
    steady_s: float = 0.0

    def __repr__(self) -> str:
        fit = "fits" if self.fits else f"does not fit on {numbered('device', self.too_full)}"
        iteration, bubble = seconds_text(self.iteration_s), percent_text(self.bubble)
        return f"Prediction(iteration {iteration}, bubble {bubble}, {fit})"

    def _repr_html_(self) -> str:
        """The timeline in a notebook; without matplotlib or a timeline, a table of the memory."""
        from penstock.timeline.plot import has_matplotlib, svg_element

        if self.timeline.events and has_matplotlib():
            return f"{svg_element(self.plot())}<p>{escape(repr(self))}</p>"
        rows = ((device, size_text(peak)) for device, peak in enumerate(self.peak_memory_bytes))
        return html_table(["device", "peak memory"], rows, repr(self))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the timeline on ``ax``, or on a new figure; returns the axes."""
        from penstock.timeline.plot import plot_timeline

        iteration, bubble = seconds_text(self.iteration_s), percent_text(self.bubble)
        return plot_timeline(self.timeline, ax, f"{iteration}, bubble {bubble}")

    @property
    def fits(self) -> bool:
        """True if every device has enough memory."""
        return not self.too_full


def simulate_plan(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    iterations: int = 1,
    with_timeline: bool = True,
) -> Prediction:
    """Simulate iterations of ``plan``, in the order of work that a training run executes.

    Each device starts its next iteration right after its own step. With several iterations a step
    waits until the gradients of all devices are summed. Without a flush, all iterations are one
    order of work. Then

        steady_s = (end of the last iteration - end of the first) / (iterations - 1)

    which is ``iteration_s`` if there is only one iteration.

    A plan that does not fit in memory is simulated all the same; `Prediction.fits` says so. With
    ``with_timeline=False`` the timeline stays empty, which saves time and memory for plans of
    millions of actions.

    Raises:
        BadInput: the plan does not match the profile or the cluster, its schedule is not valid, or
            ``iterations`` is below 1.
    """
    if iterations < 1:
        raise BadInput(f"{iterations} iterations to simulate; give at least 1")
    check_plan_fits_inputs(plan, profile, cluster)
    check_speeds(profile, cluster)
    schedule, ordered, repeats = order_of(plan), plan, iterations
    if iterations > 1 and schedule.weights.micro_batches_per_update:
        ordered, repeats = replace(plan, micro_batches=plan.micro_batches * iterations), 1
        schedule = order_of(ordered)
    workload = workload_of(
        ordered,
        profile,
        cluster,
        schedule,
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
        iterations=repeats,
    )
    if workload.iterations > 1:
        # In a run no rank steps before it has the norms of the summed gradients of all.
        workload = replace(workload, steps_together=True)
    played, devices = compiled.played(workload), cluster.devices
    timeline = Timeline((), len(devices), (), "predicted")
    if with_timeline or workload.schedule.concurrent:
        trace = played.trace()
        memory = memory_samples(workload, trace)
        timeline = timeline_of(workload, trace, len(devices), memory, "predicted")
    ends_s = played.ends_s(plan.micro_batches, iterations)
    if workload.schedule.concurrent:
        # The order alone says neither what runs side by side nor what is held meanwhile.
        bubble, peaks = bubble_fraction(timeline), peak_memory_bytes(timeline)
    else:
        busy_s = played.busy_s()
        available_s = len(busy_s) * ends_s[-1]
        bubble = max(0.0, 1.0 - sum(busy_s) / available_s) if available_s else 0.0
        held = held_while(workload.schedule, workload.instances)
        members = workload.instances.members
        peaks = peaks_bytes(workload.parts.stages, members, held, len(devices))
    return Prediction(
        timeline=timeline,
        iteration_s=ends_s[0],
        bubble=bubble,
        peak_memory_bytes=peaks,
        too_full=tuple(i for i, device in enumerate(devices) if peaks[i] > device.memory_bytes),
        steady_s=(ends_s[-1] - ends_s[0]) / (iterations - 1) if iterations > 1 else ends_s[0],
    )


def check_plan_fits_inputs(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Raise `BadInput` unless the plan has the profile's layers and only the cluster's devices.

    A plan with tensor groups must have been put on the cluster of its groups before
    (`penstock.planners.tensor_groups.on_groups`).
    """
    if plan.tensor_groups:
        raise BadInput(
            "the plan has tensor groups, which only 'penstock simulate', 'penstock train' and "
            "Pipeline can follow; plan again without --tensor-parallel"
        )
    covered = plan.stages[-1].layers.stop
    if covered != len(profile.layers):
        raise BadInput(
            f"the plan covers layers [0, {covered}) but profile '{profile.name}' has "
            f"{len(profile.layers)} layers; plan again with this profile"
        )
    for shared in profile.shared if any(s.sharding == "parameters" for s in plan.stages) else ():
        users = sorted({plan.stage_of_layer(layer) for layer in shared.layers})
        if len(users) > 1 and any(plan.stages[s].sharding == "parameters" for s in users):
            refusal = choice_refusal("parameters", plan.schedule, tied=True)
            raise BadInput(
                f"stages {users} share parameter '{shared.name}', and one divides its parameters: "
                f"it {refusal}; divide only the optimizer's state there"
            )
    devices = len(cluster.devices)
    highest = max(max(stage.devices) for stage in plan.stages)
    if highest >= devices:
        raise BadInput(
            f"the plan uses device {highest} but the cluster has {devices} devices; use a cluster "
            f"with at least {highest + 1} devices or plan again for '{cluster.name}'"
        )
