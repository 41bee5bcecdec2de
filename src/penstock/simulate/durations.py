"""From a plan, a profile and a cluster to the seconds and messages of one iteration."""

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.schedule import Schedule
from penstock.simulate.gradients import GradientCut, reductions_of, segments_of
from penstock.simulate.layer_sums import LayerSums, layer_sums
from penstock.simulate.transfers import messages_of
from penstock.simulate.workload import DeviceWork, Workload

__all__ = ["workload_of"]


def workload_of(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    schedule: Schedule,
    *,
    sums: LayerSums | None = None,
) -> Workload:
    """One iteration of ``plan`` as flat work; ``schedule`` must be valid for ``plan.shape()``.

    ``sums`` saves time where many plans of one profile are simulated.
    """
    sums = sums or layer_sums(profile)
    reductions, cuts = reductions_of(plan, profile, cluster)
    last_backward = tuple(
        next(i for i in reversed(range(len(order))) if order[i].kind in ("B", "W"))
        for order in schedule.orders
    )
    devices: list[DeviceWork] = []
    for index in range(len(plan.stages)):
        split = schedule.of(index)[last_backward[index]].kind == "W"
        for replica in range(plan.stages[index].replicas):
            device_cuts = cuts[len(devices)]
            devices.append(
                device_work(plan, profile, cluster, sums, index, replica, device_cuts, split)
            )
    return Workload(
        schedule=schedule,
        micro_batches=plan.micro_batches,
        devices=tuple(devices),
        messages=messages_of(plan, profile.edges, cluster),
        reductions=reductions,
        host_slots=tuple(host.full_speed_devices for host in cluster.hosts),
        last_backward=last_backward,
    )


def device_work(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    sums: LayerSums,
    index: int,
    replica: int,
    cuts: tuple[GradientCut, ...],
    split: bool,
) -> DeviceWork:
    """The work of one replica of stage ``index``; its device's speed divides all seconds."""
    stage = plan.stages[index]
    device, rows = stage.devices[replica], stage.slices[replica]
    speed = cluster.devices[device].speed
    gradients_s = sums.backward_weight_s if split else sums.backward_s
    return DeviceWork(
        device=device,
        stage=index,
        host=cluster.host_index[device],
        forward_s=sums.forward_s.of(stage.layers, rows) / speed,
        backward_s=sums.backward_s.of(stage.layers, rows) / speed,
        backward_input_s=sums.backward_input_s.of(stage.layers, rows) / speed,
        backward_weight_s=sums.backward_weight_s.of(stage.layers, rows) / speed,
        last_backward=segments_of(stage.layers, cuts, gradients_s, rows, speed),
        step_s=profile.step_s_per_byte * profile.parameter_bytes(stage.layers) / speed,
    )
