"""The costs of a stage: the formulas that all planners, the bounds and the messages share.

All times are of one micro-batch, all sizes of one device.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_s, message_resources, norm_sums_s
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, recalled, remembered
from penstock.plan.row_split import row_overlaps, split_rows
from penstock.plan.sharding import gathered_s, held_bytes, step_share, two_layers_bytes
from penstock.profile.model_profile import Affine, Edge, ModelProfile, first_of_each_tensor
from penstock.schedule.family import DepthFunction
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape
from penstock.schedule.warm_up import warm_up_depths


@dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds to send a micro-batch's tensors to the next stage, and their gradients back."""

    forward_s: float
    backward_s: float

    @property
    def round_trip_s(self) -> float:
        """There and back."""
        return self.forward_s + self.backward_s

    @property
    def busier_s(self) -> float:
        """The busier direction: links carry both at once."""
        return max(self.forward_s, self.backward_s)


def depth_function(schedule: str) -> DepthFunction:
    """How many micro-batches a stage of ``schedule`` keeps in flight.

    >>> depth_function("1f1b")(3, 8)
    3
    """
    family = FAMILIES.get(schedule)
    if family is None or family.depth is None:
        planned = [name for name, family in FAMILIES.items() if family.is_planned]
        raise BadInput(
            f"schedule '{schedule}' is not one that plans are made for; use one of "
            f"{', '.join(planned)}"
        )
    return family.depth


def leanest_schedule(problem: PlanningProblem) -> str:
    """The allowed schedule with the fewest micro-batches in flight; the first of equal ones."""
    return min(problem.schedules, key=lambda name: depth_function(name)(2, 4))


def rows_by_speed(cluster: Cluster, devices: Sequence[int], rows: int) -> tuple[int, ...]:
    """Rows of a micro-batch in proportion to the devices' speeds."""
    return split_rows(rows, [cluster.devices[device].speed for device in devices])


def crowding(cluster: Cluster, devices: Sequence[int]) -> float:
    """By how much ``devices`` slow one another down when all compute at once, 1 for not at all."""
    factor = 1.0
    for index, full_speed_devices in cluster.slowing_hosts.items():
        busy = sum(cluster.host_index[device] == index for device in devices)
        factor = max(factor, busy / full_speed_devices)
    return factor


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What a run of layers costs for so many rows of a micro-batch, at speed 1.

    ``weight_s`` is a part of ``backward_s``. ``saved_bytes`` are kept until the backward;
    ``input_bytes`` are those of the tensors read from earlier layers; ``workspace_bytes`` those of
    the hungriest layer.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    saved_bytes: float
    input_bytes: float
    workspace_bytes: float


def run_costs(
    problem: PlanningProblem, layers: range, rows: int, by_block: bool = False
) -> RunCosts:
    """The costs of a run of layers; ``by_block`` as in `ModelProfile.by_block`."""
    profile = problem.profile.by_block if by_block else problem.profile

    def computed() -> RunCosts:
        run = profile.layers[layers.start : layers.stop]
        return RunCosts(
            forward_s=profile.forward_s(layers, rows),
            backward_s=profile.backward_s(layers, rows),
            weight_s=sum(layer.backward_weight_s.at(rows) for layer in run),
            saved_bytes=profile.saved_bytes(layers, rows),
            input_bytes=sum(edge.bytes.at(rows) for edge in profile.incoming(layers)),
            workspace_bytes=max(layer.workspace_bytes.at(rows) for layer in run),
        )

    return recalled(problem, run_costs, (layers.start, layers.stop, rows, by_block), computed)


def state_bytes(problem: PlanningProblem, stage: Stage) -> float:
    """Bytes that each device of a stage holds all the time, whatever the micro-batches."""
    profile, layers, sharding = problem.profile, stage.layers, problem.sharding_of(stage)

    def computed() -> float:
        held = held_bytes(
            sharding,
            stage.replicas,
            float(profile.parameter_bytes(layers)),
            two_layers_bytes(profile, layers) if sharding == "parameters" else 0.0,
            2.0,
            problem.optimizer_bytes_per_parameter_byte,
        )
        return held + sum(profile.layers[layer].held_besides for layer in layers)

    key = (layers.start, layers.stop, sharding, sharding and stage.replicas)
    return recalled(problem, state_bytes, key, computed)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a micro-batch on the slowest replica, with recompute only if it is by block.

    ``whole_s`` may be less than forward plus backward, because different replicas may be slowest in
    the two. ``weight_s`` is the weights' half of the backward, ``after_s`` what follows the last
    backward: gradient all-reduce and optimizer step.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    whole_s: float
    after_s: float


def stage_seconds(problem: PlanningProblem, stage: Stage) -> StageSeconds:
    """The seconds of a stage; its replicas slow one another down where they share cores."""
    cluster, profile = problem.cluster, problem.profile
    sharding = problem.sharding_of(stage)

    def computed() -> StageSeconds:
        devices = [cluster.devices[device] for device in stage.devices]
        kinds = {(rows, d.speed) for d, rows in zip(devices, stage.slices, strict=True)}
        costs = problem.profile_of(stage)
        runs = [
            (run_costs(problem, stage.layers, rows, stage.by_block), speed) for rows, speed in kinds
        ]
        crowded = crowding(cluster, stage.devices)
        there_s, back_s = norms_s(problem, stage)
        size_bytes = profile.parameter_bytes(stage.layers)
        read_s = max(device.chip.read_s(size_bytes) for device in devices)
        step_s = size_bytes * profile.step_s_per_byte * crowded / min(d.speed for d in devices)
        if sharding == "parameters":
            own = replace(stage, sharding=sharding)
            passes = (gathered_s(costs, cluster, own, forward=forward) for forward in (True, False))
            forward_s, backward_s = (
                (max(read_s, seconds) + norm_s) * crowded
                for seconds, norm_s in zip(passes, (there_s, back_s), strict=True)
            )
            whole_s, step_s = forward_s + backward_s, step_s * step_share(own)
            return StageSeconds(forward_s, backward_s, 0.0, whole_s, step_s)
        forward_s = max(read_s, *(run.forward_s / speed for run, speed in runs))
        computed_s = max(run.backward_s / speed for run, speed in runs)
        backward_s = max(read_s, computed_s)
        # Where reads make a backward longer, both of its halves are so by as much.
        longer = backward_s / computed_s if computed_s else 1.0
        weight_s = max(run.weight_s / speed for run, speed in runs) * longer
        whole_s = forward_s + backward_s
        if not read_s:
            whole_s = max((run.forward_s + run.backward_s) / speed for run, speed in runs)
        return StageSeconds(
            forward_s=(forward_s + there_s) * crowded,
            backward_s=(backward_s + back_s) * crowded,
            weight_s=weight_s * crowded,
            whole_s=(whole_s + (there_s + back_s)) * crowded,
            after_s=all_reduce_s(cluster, stage.devices, size_bytes) + step_s,
        )

    layers = stage.layers
    key = (layers.start, layers.stop, stage.devices, stage.slices, stage.by_block, sharding)
    return recalled(problem, stage_seconds, key, computed)


def norms_s(problem: PlanningProblem, stage: Stage) -> tuple[float, float]:
    """Seconds that replicas wait for batch norm's statistics, in a forward and in a backward."""
    if len(stage.devices) < 2 or not problem.profile.has_norms:
        return 0.0, 0.0
    layers = problem.profile.layers[stage.layers.start : stage.layers.stop]
    norms = sum(layer.norms for layer in layers)
    channels = sum(layer.norm_channels for layer in layers)
    there_s, back_s = norm_sums_s(problem.cluster, stage.devices, norms, channels)
    return there_s, back_s + (there_s if stage.by_block else 0.0)


def crossing_bytes(profile: ModelProfile, cut: int, of: Callable[[Edge], Affine]) -> Affine:
    """Bytes of all tensors from before ``cut`` to after it, each counted once."""
    return sum((of(edge) for edge in first_of_each_tensor(profile.crossing[cut])), Affine())


def transfer(problem: PlanningProblem, sender: Stage, receiver: Stage) -> Transfer:
    """Seconds between two neighbouring stages, as if all that crosses the cut passed there.

    In fact a tensor for a later stage goes straight to it. Charging it to each cut that it crosses
    keeps the recurrence a chain. The simulator sends the tensor on its true path.
    """
    cut, cluster = receiver.layers.start, problem.cluster
    down = (sender.devices, sender.slices, receiver.devices, receiver.slices)
    up = (receiver.devices, receiver.slices, sender.devices, sender.slices)

    def computed() -> Transfer:
        activations, gradients = known_crossings(problem)[cut]
        return Transfer(
            forward_s=split_concat_s(cluster, *down, activations.at),
            backward_s=split_concat_s(cluster, *up, gradients.at),
        )

    return recalled(problem, transfer, (cut, *down), computed)


def split_concat_s(
    cluster: Cluster,
    sender_devices: Sequence[int],
    sender_slices: Sequence[int],
    receiver_devices: Sequence[int],
    receiver_slices: Sequence[int],
    bytes_of_rows: Callable[[int], float],
) -> float:
    """Seconds to move the rows of one micro-batch from one stage's replicas to another's.

    Each sender sends each receiver the rows that both hold (split/concat of DAPPLE, PPoPP 2021):

        sender slices     |   0   |   1   |
        receiver slices   |  0 | 1  |  2  |        messages 0->0, 0->1, 1->1, 1->2

    A device sends its messages one after the other and receives them one after the other. Messages
    between hosts also take turns on the ports. The result is the time of the busiest resource.
    ``bytes_of_rows(n)`` are the bytes of ``n`` rows.
    """
    if len(sender_devices) == len(receiver_devices) == 1:
        size_bytes = bytes_of_rows(sender_slices[0])
        return cluster.transfer_s(sender_devices[0], receiver_devices[0], size_bytes)
    busy_s: dict[tuple[str, int], float] = defaultdict(float)
    for sender, receiver, rows in row_overlaps(sender_slices, receiver_slices):
        source, target = sender_devices[sender], receiver_devices[receiver]
        # Rows that stay on their device need no message.
        if source != target:
            seconds = cluster.transfer_s(source, target, bytes_of_rows(len(rows)))
            for resource in message_resources(cluster, source, target):
                busy_s[resource] += seconds
    return max(busy_s.values(), default=0.0)


@remembered
def known_crossings(problem: PlanningProblem) -> list[tuple[Affine, Affine]]:
    """Bytes of activations and of gradients that cross each cut."""
    profile = problem.profile
    return [
        (
            crossing_bytes(profile, cut, lambda edge: edge.bytes),
            crossing_bytes(profile, cut, lambda edge: edge.gradient_bytes),
        )
        for cut in range(len(profile.layers) + 1)
    ]


def device_memory_bytes(problem: PlanningProblem, stage: Stage, rows: int, in_flight: int) -> float:
    """Peak bytes of a device that holds ``stage`` and computes ``rows`` rows of a micro-batch.

    parameters + gradients + optimizer state + buffers + workspace of the hungriest layer
      + in flight * saved                                     (all kept, or only one in flight)
      + (in flight - 1) * stage inputs + max(saved, inputs)   (recompute)

    By block a layer saves what it reads (`ModelProfile.by_block`). What devices divide counts as
    `penstock.plan.sharding.held_bytes` says.
    """
    run = run_costs(problem, stage.layers, rows, stage.by_block)
    held = state_bytes(problem, stage) + run.workspace_bytes
    if stage.recompute and in_flight > 1:
        inputs = (in_flight - 1) * run.input_bytes
        return held + inputs + max(run.saved_bytes, run.input_bytes)
    return held + in_flight * run.saved_bytes


def peak_memory_bytes(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """Peak bytes of every device of ``plan``, in the order of ``plan.devices``."""
    return tuple(
        device_memory_bytes(problem, stage, rows, in_flight)
        for stage, in_flight in zip(plan.stages, depths_of(plan), strict=True)
        for rows in stage.slices
    )


def depths_of(plan: Plan) -> tuple[int, ...]:
    """The most micro-batches that each stage of ``plan`` has in flight."""
    depth = depth_function(plan.schedule)
    exactly_as_limited = plan.schedule == "early-backward" and plan.in_flight_limit

    def in_flight(shape: PipelineShape, stage: int) -> int:
        if exactly_as_limited:
            return shape.limit(stage)
        return depth(shape.stages - stage, shape.micro_batches)

    return warm_up_depths(plan.shape(), in_flight)


def estimate_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds of an iteration by the recurrence of `penstock.planners.dynamic_program`.

    It is an estimate, not a bound: no all-reduce overlaps the drain of the stages before it, and
    unequal stages do not wait for one another.
    """
    depths = depths_of(plan)
    rest_s = 0.0
    for index in reversed(range(len(plan.stages))):
        stage = plan.stages[index]
        seconds = stage_seconds(problem, stage)
        busy_s = seconds.whole_s
        if stage.recompute and depths[index] > 1:
            busy_s += seconds.forward_s
        own_s = plan.micro_batches * busy_s + seconds.after_s
        if index + 1 < len(plan.stages):
            moved = transfer(problem, stage, plan.stages[index + 1])
            own_s = max(own_s, plan.micro_batches * moved.busier_s)
            rest_s += busy_s + moved.round_trip_s
        rest_s = max(own_s, rest_s)
    return rest_s
